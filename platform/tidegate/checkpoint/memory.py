"""The tier in memory: copies that live on this run's nodes, their own ones and those that they keep for a buddy.

A checkpoint is there when the copies of all its ranks are, on whichever nodes. What one node has is a shelf: this
node's is a folder in shared memory, another node's is asked over the network (`shelf.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from tidegate.checkpoint.folders import HELD, SlotFolder
from tidegate.checkpoint.manifest import Manifest, ShardSeen
from tidegate.checkpoint.tiers import Candidate, FolderSource
from tidegate.errors import CheckpointError, UnfinishedError


@dataclass(frozen=True, slots=True)
class Copy:
    """A sealed copy on a shelf."""

    key: str
    """Names it there."""
    about: Manifest
    """With this one shard."""

    @property
    def shard(self) -> ShardSeen:
        return self.about.files[0]

    @property
    def candidate(self) -> Candidate:
        return Candidate(self.about.step, self.about.generation)


class Shelf(Protocol):
    """One node's copies."""

    @property
    def label(self) -> str: ...

    def copies(self) -> Sequence[Copy]:
        """
        Raises:
            CheckpointError: the node does not answer.
        """
        ...

    def view(self, copy: Copy, offset: int, count: int, scratch: memoryview) -> memoryview:
        """As `Source.view`."""
        ...

    def close(self) -> None: ...


class LocalShelf:
    """This node's folder in shared memory."""

    label = "memory"

    def __init__(self, folder: Path) -> None:
        self._folder, self._files = folder, FolderSource(folder)

    def copies(self) -> Sequence[Copy]:
        folders = [self._folder, *sorted((self._folder / HELD).glob("*"))]
        return [
            Copy(path.relative_to(self._folder).as_posix(), about)
            for folder in folders
            for path, about in SlotFolder(folder).sealed().items()
            if len(about.files) == 1 and path.is_file() and path.stat().st_size >= about.files[0].bytes
        ]

    def view(self, copy: Copy, offset: int, count: int, scratch: memoryview) -> memoryview:
        # Read and not mapped: a new process would pay for each page of a mapping more than for the copy.
        return self._files.view(copy.key, offset, count, scratch)

    def close(self) -> None:
        self._files.__exit__()


class Memory:
    """The tier over all shelves, the nearest first."""

    label = "memory"
    far = False

    def __init__(self, shelves: Sequence[Shelf]) -> None:
        self._shelves = shelves

    def candidates(self) -> Sequence[Candidate]:
        return sorted({copy.candidate for _, copy in self._all()})

    def manifest(self, candidate: Candidate) -> Manifest:
        copies = {copy.shard.name: copy for _, copy in self._all() if copy.candidate == candidate}
        first = next(iter(copies.values()), None)
        if first is None:
            raise UnfinishedError("its copies are gone")
        if len(copies) != first.about.world_size:
            raise UnfinishedError(f"{len(copies)} of {first.about.world_size} ranks' copies are there")
        shards = tuple(copies[name].shard for name in sorted(copies))
        return first.about.model_copy(update={"files": shards})

    def source(self, candidate: Candidate) -> MemorySource:
        places: dict[str, tuple[Shelf, Copy]] = {}
        for shelf, copy in self._all():
            if copy.candidate == candidate:
                places.setdefault(copy.shard.name, (shelf, copy))
        return MemorySource(places)

    def _all(self) -> list[tuple[Shelf, Copy]]:
        """A node that does not answer has nothing; if it was needed, the count says so."""
        found = []
        for shelf in self._shelves:
            try:
                found += [(shelf, copy) for copy in shelf.copies()]
            except CheckpointError:
                continue
        return found


class MemorySource:
    streams, chunk_bytes, fills_any = 2, 1 << 20, True

    def __init__(self, places: Mapping[str, tuple[Shelf, Copy]]) -> None:
        self._places = places

    def view(self, file: str, offset: int, count: int, scratch: memoryview) -> memoryview:
        if file not in self._places:
            raise CheckpointError(f"{file}: in no node's memory")
        shelf, copy = self._places[file]
        return shelf.view(copy, offset, count, scratch)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        for shelf, _ in self._places.values():
            shelf.close()
