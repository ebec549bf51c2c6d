"""What a node agent's forkserver imports once, so that no rank has to. Importing this module does it.

It starts no thread and touches no CUDA, so forking afterwards is safe.
"""

import contextlib
import gc
import importlib

from PIL import Image

LAZY = ("pyarrow.dataset", "pandas")
"""What pyarrow's first `read_table` imports, pandas where it is installed: 0.2 s of each rank's restart."""

importlib.import_module("tidegate.train.loop")
for name in LAZY:
    with contextlib.suppress(ImportError):  # what is not installed is not missed: pyarrow does without, too
        importlib.import_module(name)
Image.preinit()

# A rank's first garbage collection would walk, and by that copy, all that it shares with its forkserver: 0.3 s.
gc.collect()
gc.freeze()
