"""Where checkpoints are kept for long: tiers that also hold marks, and can forget one."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from tidegate.checkpoint.folders import SHARED_MEMORY, folder_of
from tidegate.checkpoint.manifest import MANIFEST
from tidegate.checkpoint.marks import Mark, clear_mark, marks_in, set_mark
from tidegate.checkpoint.memory import LocalShelf, Memory
from tidegate.checkpoint.tiers import Candidate, Disk, Tier
from tidegate.errors import CheckpointError


@runtime_checkable
class Place(Tier, Protocol):
    """A tier that people look after."""

    def marks(self, candidate: Candidate) -> Mapping[Mark, str]: ...

    def mark(self, candidate: Candidate, mark: Mark, why: str) -> None: ...

    def unmark(self, candidate: Candidate, mark: Mark) -> None: ...

    def remove(self, candidate: Candidate) -> None:
        """Delete it, manifest first: cut short, what is left does not look whole."""
        ...


@dataclass(frozen=True, slots=True)
class DiskPlace(Disk):
    """Folders below `checkpoints`."""

    def marks(self, candidate: Candidate) -> Mapping[Mark, str]:
        return marks_in(self._at(candidate))

    def mark(self, candidate: Candidate, mark: Mark, why: str) -> None:
        try:
            set_mark(self._at(candidate), mark, why)
        except OSError as error:
            raise CheckpointError(f"{self._at(candidate) / mark}: {error.strerror}") from None

    def unmark(self, candidate: Candidate, mark: Mark) -> None:
        try:
            clear_mark(self._at(candidate), mark)
        except OSError as error:
            raise CheckpointError(f"{self._at(candidate) / mark}: {error.strerror}") from None

    def remove(self, candidate: Candidate) -> None:
        try:
            (self._at(candidate) / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(self._at(candidate))
        except OSError as error:
            raise CheckpointError(f"{error.filename}: {error.strerror}") from None

    def _at(self, candidate: Candidate) -> Path:
        return self.checkpoints / candidate.name


def marked(disk: Disk, mark: Mark) -> list[Candidate]:
    """Those on disk that have a mark, the newest last."""
    return sorted(candidate for candidate in disk.candidates() if (disk.checkpoints / candidate.name / mark).exists())


def disk_of(run_dir: Path) -> DiskPlace:
    """The checkpoints on disk of a run.

    Raises:
        CheckpointError: the folder is no run's.
    """
    checkpoints = run_dir / "checkpoints"
    if not checkpoints.is_dir():
        raise CheckpointError(f"{run_dir}: has no folder `checkpoints`\nhint: name the run's directory (--run-dir)")
    return DiskPlace(checkpoints)


def memory_of(run_dir: Path) -> tuple[Memory, ...]:
    """The copies of a run in this machine's shared memory, whatever the run and the node are called; none if none."""
    any_name = folder_of("*", run_dir, {}).parent.name
    shelves = [LocalShelf(folder) for folder in sorted(SHARED_MEMORY.glob(f"{any_name}/*"))]
    return (Memory(shelves),) if shelves else ()
