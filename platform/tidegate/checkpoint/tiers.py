"""Where checkpoints lie, from near to far: memory of this node, of a buddy node, disk, object store.

A restore asks every tier what it has, takes the newest that its tier can vouch for, and reads pieces of its files. So
a tier answers three questions, and nothing else of it is known here.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from tidegate.checkpoint.manifest import MANIFEST, Manifest, folder_name, parse_manifest, parse_name
from tidegate.errors import CheckpointError


@dataclass(frozen=True, slots=True, order=True)
class Candidate:
    """A checkpoint that a tier may hold; newer ones are greater."""

    step: int
    generation: int

    @property
    def name(self) -> str:
        return folder_name(self.step, self.generation)


class Source(Protocol):
    """The files of one checkpoint, open for reading. May be read by several threads at once."""

    def read_into(self, file: str, offset: int, out: memoryview) -> None:
        """Fill `out` with the bytes of `file` from `offset` on.

        Raises:
            CheckpointError: the file is gone, ends before that, or cannot be read; says which and why.
        """
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *raised: object) -> None: ...


class Tier(Protocol):
    """One place that keeps checkpoints of one run."""

    @property
    def label(self) -> str:
        """`memory`, `buddy`, `disk`, `s3`: names it in events."""
        ...

    def candidates(self) -> Sequence[Candidate]:
        """All that may be there, in any order, torn ones too.

        Raises:
            CheckpointError: the tier cannot be looked through at all; says why.
        """
        ...

    def manifest(self, candidate: Candidate) -> Manifest:
        """Its manifest, after every check that needs no reading of whole files: the manifest parses and is this
        candidate's, and each file that it lists is there with its size. Content is checked as it is read.

        Raises:
            CheckpointError: with the first thing that is wrong.
        """
        ...

    def source(self, candidate: Candidate) -> Source:
        """Open it for reading.

        Raises:
            CheckpointError: it cannot be opened; says why.
        """
        ...


@dataclass(frozen=True, slots=True)
class Disk:
    """Folders below `checkpoints`, as `disk.py` writes them."""

    checkpoints: Path
    label: str = "disk"

    def candidates(self) -> Sequence[Candidate]:
        try:
            names = os.listdir(self.checkpoints)
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise CheckpointError(f"{self.checkpoints}: {error.strerror}") from None
        return tuple(Candidate(*parsed) for parsed in map(parse_name, names) if parsed is not None)

    def manifest(self, candidate: Candidate) -> Manifest:
        folder = self.checkpoints / candidate.name
        try:
            data = (folder / MANIFEST).read_bytes()
        except FileNotFoundError:
            raise CheckpointError("never committed: no manifest") from None
        except OSError as error:
            raise CheckpointError(f"{MANIFEST}: {error.strerror}") from None
        manifest = parse_manifest(data)
        check_owner(manifest, candidate)
        for file in manifest.files:
            try:
                size = (folder / file.name).stat().st_size
            except OSError as error:
                raise CheckpointError(f"{file.name}: {error.strerror}") from None
            if size != file.bytes:
                raise CheckpointError(f"{file.name}: {size} bytes, must be {file.bytes}")
        return manifest

    def source(self, candidate: Candidate) -> FolderSource:
        return FolderSource(self.checkpoints / candidate.name)


def check_owner(manifest: Manifest, candidate: Candidate) -> None:
    """
    Raises:
        CheckpointError: the manifest belongs to another checkpoint than its name says.
    """
    if (manifest.step, manifest.generation) != (candidate.step, candidate.generation):
        raise CheckpointError(f"{MANIFEST} is of step {manifest.step}, generation {manifest.generation}")


class FolderSource:
    """Files of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, int] = {}

    def read_into(self, file: str, offset: int, out: memoryview) -> None:
        try:
            handle = self._open.get(file)
            if handle is None:
                # Two threads may both open it; the one that comes second closes its own again.
                mine = os.open(self._folder / file, os.O_RDONLY | os.O_CLOEXEC)
                handle = self._open.setdefault(file, mine)
                if handle != mine:
                    os.close(mine)
            while out:
                count = os.preadv(handle, [out], offset)
                if not count:
                    raise CheckpointError(f"{file}: ends at {offset}, {len(out)} bytes early")
                out, offset = out[count:], offset + count
        except OSError as error:
            raise CheckpointError(f"{file}: {error.strerror}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        while self._open:
            os.close(self._open.popitem()[1])
