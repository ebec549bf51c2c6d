"""A venv for each peer that must not share ours: `benchmarks/peers/NAME/requirements.txt`, made when first needed."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import venv
from pathlib import Path

PEERS = Path(__file__).parent


def python_of(peer: str) -> Path:
    """The interpreter of a peer's venv, which lies in the peer's folder and is made anew when its requirements change.

    Raises:
        subprocess.CalledProcessError: pip could not install them.
    """
    requirements = PEERS / peer / "requirements.txt"
    folder = PEERS / peer / ".venv"
    stamp, now = folder / "requirements.sha256", hashlib.sha256(requirements.read_bytes()).hexdigest()
    python = folder / "bin" / "python"
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != now:
        print(f"making {folder}", file=sys.stderr, flush=True)
        venv.create(folder, clear=True, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--requirement", requirements], check=True)
        stamp.write_text(now, encoding="utf-8")
    return python
