"""Where checkpoints are kept for long: tiers that also hold marks, check every byte, and can forget one."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tidegate.checkpoint.files import file_problem
from tidegate.checkpoint.manifest import MANIFEST, Manifest
from tidegate.checkpoint.marks import Mark, clear_mark, marks_in, set_mark
from tidegate.checkpoint.tiers import Candidate, Disk, Tier
from tidegate.errors import CheckpointError


class Place(Tier, Protocol):
    """A tier that people look after."""

    def is_committed(self, candidate: Candidate) -> bool:
        """Whether it has a manifest, whatever that says. One that has none is unfinished: a save may be writing it."""
        ...

    def checked(self, candidate: Candidate) -> Manifest:
        """Its manifest, after every byte of every file was read and compared with it.

        Raises:
            CheckpointError: with the first thing that is wrong.
        """
        ...

    def marks(self, candidate: Candidate) -> Mapping[Mark, str]: ...

    def mark(self, candidate: Candidate, mark: Mark, why: str) -> None: ...

    def unmark(self, candidate: Candidate, mark: Mark) -> None: ...

    def remove(self, candidate: Candidate) -> None:
        """Delete it, manifest first: cut short, what is left does not look whole."""
        ...

    def folder(self, candidate: Candidate, cache: Path) -> AbstractContextManager[Path]:
        """Its files as a local folder while the context lasts; fetched into `cache` where they are far away."""
        ...


@dataclass(frozen=True, slots=True)
class DiskPlace(Disk):
    """Folders below `checkpoints`."""

    def is_committed(self, candidate: Candidate) -> bool:
        return (self._at(candidate) / MANIFEST).exists()

    def checked(self, candidate: Candidate) -> Manifest:
        manifest = self.manifest(candidate)
        for file in manifest.files:
            problem = file_problem(self._at(candidate), file)
            if problem is not None:
                raise CheckpointError(problem)
        return manifest

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

    def folder(self, candidate: Candidate, cache: Path) -> AbstractContextManager[Path]:
        return nullcontext(self._at(candidate))

    def _at(self, candidate: Candidate) -> Path:
        return self.checkpoints / candidate.name


def disk_of(run_dir: Path) -> DiskPlace:
    """The checkpoints on disk of a run.

    Raises:
        CheckpointError: the folder is no run's.
    """
    checkpoints = run_dir / "checkpoints"
    if not checkpoints.is_dir():
        raise CheckpointError(f"{run_dir}: has no folder `checkpoints`\nhint: name the run's directory (--run-dir)")
    return DiskPlace(checkpoints)
