"""A checkpoint that retention leaves alone: a file in its folder says so, and why."""

from __future__ import annotations

from pathlib import Path

from tidegate.checkpoint.manifest import MANIFEST
from tidegate.checkpoint.marks import Mark
from tidegate.checkpoint.places import DiskPlace
from tidegate.errors import CheckpointError
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
    disk = DiskPlace(checkpoints)
    try:
        for candidate in sorted(disk.candidates(), reverse=True):
            if candidate.step <= step and (checkpoints / candidate.name / MANIFEST).exists():
                disk.mark(candidate, Mark.PINNED, reason)
                return candidate.name
    except CheckpointError:
        return None
    return None
