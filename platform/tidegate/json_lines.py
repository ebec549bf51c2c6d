"""Files of one JSON object a line, only ever appended to: a crash may leave the last line torn."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_lines(path: Path, begin_bytes: int = 0) -> Iterator[dict[str, Any]]:
    """The whole lines from a line's first byte on; a torn last one is left out. Nothing where there is no file."""
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(begin_bytes)
        for line in file:
            if line.endswith(b"\n"):
                yield json.loads(line)


def cut_torn_line(path: Path) -> None:
    """Cut off a last line that a crash has left unfinished, before something is written behind it."""
    if not path.exists():
        return
    text = path.read_bytes()
    whole = text.rfind(b"\n") + 1
    if whole != len(text):
        os.truncate(path, whole)
