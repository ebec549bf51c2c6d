"""A checkpoint that retention leaves alone: a file in its folder says so, and why."""

from __future__ import annotations

from pathlib import Path

from tidegate.checkpoint.files import write_synced
from tidegate.checkpoint.manifest import MANIFEST, parse_name
from tidegate.checkpoint.retention import PINNED


def pin(checkpoints: Path, step: int, reason: str) -> str | None:
    """Pin the newest committed checkpoint of at most `step`; its name, None where there is none or it can't be."""
    names = [path.name for path in checkpoints.iterdir()] if checkpoints.is_dir() else []
    found = [(parsed, name) for name in names if (parsed := parse_name(name)) is not None and parsed[0] <= step]
    for _, name in sorted(found, reverse=True):
        if (checkpoints / name / MANIFEST).exists():
            try:
                write_synced(checkpoints / name / PINNED, reason.encode() + b"\n")
            except OSError:
                return None
            return name
    return None
