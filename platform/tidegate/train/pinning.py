"""A checkpoint that retention leaves alone: a file in its folder says so, and why."""

from __future__ import annotations

from pathlib import Path

from tidegate.checkpoint.manifest import MANIFEST, parse_name
from tidegate.checkpoint.marks import Mark, set_mark
from tidegate.train.level import Shift
from tidegate.train.records import Records


def warn_and_pin(checkpoints: Path, step: int, shift: Shift, records: Records) -> None:
    """Rank 0 tells of a loss that stays higher since `shift.before_step`, and keeps the checkpoint from before."""
    records.event("level_shift", step=step, reason=shift.reason, before_step=shift.before_step)
    pinned = pin(checkpoints, shift.before_step, shift.reason)
    if pinned is not None:
        records.event("pinned", step=step, checkpoint=pinned)
    else:
        records.event("not_pinned", step=step, reason="no checkpoint from before it is left")


def pin(checkpoints: Path, step: int, reason: str) -> str | None:
    """Pin the newest committed checkpoint of at most `step`; its name, None where there is none or it can't be."""
    names = [path.name for path in checkpoints.iterdir()] if checkpoints.is_dir() else []
    found = [(parsed, name) for name in names if (parsed := parse_name(name)) is not None and parsed[0] <= step]
    for _, name in sorted(found, reverse=True):
        if (checkpoints / name / MANIFEST).exists():
            try:
                set_mark(checkpoints / name, Mark.PINNED, reason)
            except OSError:
                return None
            return name
    return None
