"""A run's checkpoints as its loop sees them: the tiers to restore from, and the saver."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch.distributed as dist

from tidegate.checkpoint.disk import Saver, WhenLate
from tidegate.checkpoint.folders import SHARED_MEMORY, SHELF_SECRET, SHELVES, SlotFolder, folder_of, remove_leftovers
from tidegate.checkpoint.layout import Part
from tidegate.checkpoint.memory import LocalShelf, Memory
from tidegate.checkpoint.ring import Ring, shared_ring
from tidegate.checkpoint.shelf import RemoteShelf
from tidegate.checkpoint.tiers import Candidate, Disk, Tier


class Keeping:
    """One rank's view of them."""

    def __init__(self, run: str, run_dir: Path, environment: Mapping[str, str], *, in_memory: bool) -> None:
        """`in_memory`: whether copies are kept in shared memory, which a dead rank's successor restores from."""
        self.checkpoints = run_dir / "checkpoints"
        self._local_rank = int(environment.get("LOCAL_RANK", "0"))
        self._folder = SlotFolder(folder_of(run, run_dir, environment)) if in_memory else None
        places = [place.rpartition(":") for place in environment.get(SHELVES, "").split()]
        secret = environment.get(SHELF_SECRET, "").encode()
        self._others = [RemoteShelf(address, int(port), secret) for address, _, port in places]

    def tiers(self) -> tuple[Tier, ...]:
        """The nearest first."""
        disk = Disk(self.checkpoints)
        if self._folder is None:
            return (disk,)
        return (Memory([LocalShelf(self._folder.path), *self._others]), disk)

    def saver(
        self,
        parts: Sequence[Part],
        *,
        group: dist.ProcessGroup,
        generation: int,
        keep: int,
        newest: Candidate | None = None,
        rotten: frozenset[str] = frozenset(),
        when_late: WhenLate = "wait",
    ) -> tuple[Saver, str | None]:
        """The saver, and why there are no copies in shared memory though there should be. To be called by all ranks:
        where one of them has no room, none keeps any. `newest`: the run's newest checkpoint; its copy is changed last.
        `rotten`: names of those on disk that did not verify."""
        ring, problem = None, None
        if self._folder is not None:
            ring, problem = self.ring(parts, newest, group)
        saver = Saver(
            self.checkpoints,
            parts,
            group=group,
            generation=generation,
            keep=keep,
            rotten=rotten,
            ring=ring,
            when_late=when_late,
        )
        return saver, problem

    def ring(
        self, parts: Sequence[Part], newest: Candidate | None, group: dist.ProcessGroup
    ) -> tuple[Ring | None, str | None]:
        """Copies in turn, or why not; the same on all ranks."""
        assert self._folder is not None
        if self._local_rank == 0:
            remove_leftovers(SHARED_MEMORY, time.time(), spare=self._folder.path)
        ring, problem = None, None
        try:
            ring = shared_ring(
                self._folder,
                parts,
                rank=dist.get_rank(group),
                local_rank=self._local_rank,
                newest=newest,
            )
        except OSError as error:
            problem = f"rank {dist.get_rank(group)}: {error.strerror}"
        problems: list[str | None] = [None] * dist.get_world_size(group)
        dist.all_gather_object(problems, problem, group=group)
        first = next((problem for problem in problems if problem), None)
        if first is not None and ring is not None:
            ring.close()
            ring = None
        return ring, first

    def forget(self) -> None:
        """The run is over and safe elsewhere: free this node's copies. All ranks must be done with them."""
        if self._folder is not None:
            self._folder.let_go()
            self._folder.remove()
