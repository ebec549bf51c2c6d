"""A rank's two copies in shared memory, used in turn."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from pathlib import Path

from tidegate.checkpoint.folders import SlotFolder, room_problem
from tidegate.checkpoint.layout import Part, laid_out
from tidegate.checkpoint.slots import Slot
from tidegate.checkpoint.tiers import Candidate
from tidegate.checkpoint.turns import next_slot

_NAMES = "ab"


class Ring:
    """Hands out the copy that may be changed. All ranks must ask with the same arguments: then a copy that is whole on
    one of them is whole on all."""

    def __init__(self, opened: Callable[[int], Slot], *, two: bool = False, good: int | None = None) -> None:
        """`opened` makes a copy's memory ready, which takes as long as a save: at once, but for the one at `good`,
        which holds what the run was restored from and stays until it must go."""
        self.two = two
        self._opened, self._good = opened, good
        self._last: int | None = None
        self._writing: int | None = None
        self._slots = {index: opened(index) for index in ((0, 1) if two else (0,)) if index != good}

    def take(self, *, last_is_good: bool, busy: bool) -> Slot:
        """`last_is_good`: the copy that was handed out last is whole on every rank. `busy`: the one that is being
        written to disk still is, on some rank."""
        if last_is_good:
            self._good = self._last
        index = next_slot(self._good, self._writing if busy else None) if self.two else 0
        if self._good == index:
            self._good = None
        self._last = index
        if index not in self._slots:
            self._slots[index] = self._opened(index)
        return self._slots[index]

    def written(self, slot: Slot) -> None:
        """This one goes to disk now."""
        self._writing = self._last

    def close(self) -> None:
        for slot in self._slots.values():
            slot.close()
        self._slots = {}


def shared_ring(
    folder: SlotFolder, parts: Sequence[Part], *, rank: int, local_rank: int, newest: Candidate | None
) -> Ring:
    """Two copies in `folder`, of which the one that holds `newest` is changed last.

    Raises:
        OSError: shared memory has no room for them, or cannot be used.
    """
    folder.hold()
    paths = [folder.path / f"{local_rank}.{name}" for name in _NAMES]
    problem = room_problem(paths, laid_out(parts).padded_bytes)
    if problem is not None:
        raise OSError(errno.ENOSPC, problem)
    found = {path: Candidate(about.step, about.generation) for path, about in folder.sealed().items()}
    good = next((index for index, path in enumerate(paths) if newest and found.get(path) == newest), None)

    def opened(index: int) -> Slot:
        return Slot(parts, rank, Path(paths[index]))

    return Ring(opened, two=True, good=good)
