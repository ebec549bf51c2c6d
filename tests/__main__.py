"""`python tests [pytest's arguments]`. Without arguments all tests, in two processes beside each other: tests with a
cluster mostly wait, and the others, at a lower priority, take the time that is left.

Each ends without the interpreter's take-down. Once in ten runs Ray's driver library (2.60) crashed in there, after
every test had passed and every cluster was gone: dozens of connections in one process. A command of ours connects once,
and was never seen to.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

import pytest

LOWER = 5
"""Added niceness: about a quarter of a core that both want."""


def both() -> int:
    """All tests; 0 if all passed. What those without a cluster say comes last."""
    command = [sys.executable, __file__]
    with tempfile.TemporaryFile() as said:
        beside = subprocess.Popen(
            ["nice", "-n", str(LOWER), *command, "-m", "not cluster"], stdout=said, stderr=subprocess.STDOUT
        )
        code = subprocess.run([*command, "-m", "cluster"], check=False).returncode
        code = beside.wait() or code
        said.seek(0)
        sys.stdout.buffer.write(said.read())
    return code


if __name__ == "__main__":  # processes that a test spawns import this file too
    code = pytest.main(sys.argv[1:]) if sys.argv[1:] else both()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
