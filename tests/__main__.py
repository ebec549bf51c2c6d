"""`python tests [pytest's arguments]`: pytest, and then an end without the interpreter's take-down.

Once in about ten runs Ray's driver library (2.60) crashed in there, after every test had passed and every cluster was
gone: dozens of connections in one process. A command of ours connects once, and was never seen to.
"""

import os
import sys

import pytest

if __name__ == "__main__":  # processes that a test spawns import this file too
    code = pytest.main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
