"""Which checkpoints may go. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Seen:
    step: int
    generation: int
    good: bool
    """It has a manifest and nobody found it rotten."""
    kept: bool = False
    """Somebody has pinned it, or it is still on its way to the object store."""


def doomed(seen: Sequence[Seen], keep: int) -> tuple[Seen, ...]:
    """Those to delete, oldest first: good ones beyond the newest `keep`, and bad ones older than the newest good one.

    The newest good one always stays, and so does all that is newer: a save in flight looks like a bad one. What is kept
    stays too, and does not count: a pin costs room, not one of the `keep`.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, got {keep}")
    good = sorted(item for item in seen if item.good)
    if not good:
        return ()
    newest = (good[-1].step, good[-1].generation)
    bad = [item for item in seen if not item.good and (item.step, item.generation) < newest]
    loose = [item for item in good[:-1] if not item.kept]
    spare = len(loose) - (keep - 1)
    return tuple(sorted([*loose[: max(0, spare)], *(item for item in bad if not item.kept)]))
