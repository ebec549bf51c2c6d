"""Which checkpoints may go. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PINNED = "pinned"
"""A checkpoint whose folder has a file of this name stays; its text says why."""


@dataclass(frozen=True, slots=True, order=True)
class Seen:
    step: int
    generation: int
    good: bool
    """It has a manifest and nobody found it rotten."""
    pinned: bool = False


def doomed(seen: Sequence[Seen], keep: int) -> tuple[Seen, ...]:
    """Those to delete, oldest first: good ones beyond the newest `keep`, and bad ones older than the newest good one.

    Pinned ones stay, and are not counted. The newest good one always stays, and so does all that is newer: a save in
    flight looks like a bad one.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, got {keep}")
    good = sorted(item for item in seen if item.good)
    if not good:
        return ()
    newest = (good[-1].step, good[-1].generation)
    bad = [item for item in seen if not item.good and (item.step, item.generation) < newest]
    beyond = [item for item in good if not item.pinned][:-keep]
    return tuple(sorted([*beyond, *(item for item in bad if not item.pinned)]))
