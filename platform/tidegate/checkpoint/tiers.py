"""Where checkpoints lie, from near to far: memory of this node, of a buddy node, disk, object store.

A restore asks every tier what it has, takes the newest that its tier can vouch for, and reads pieces of its files. So
a tier answers three questions, and nothing else of it is known here.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from tidegate.checkpoint.manifest import MANIFEST, Manifest, folder_name, parse_manifest, parse_name
from tidegate.checkpoint.marks import refuse_bad
from tidegate.checkpoint.sums import PAGE
from tidegate.errors import CheckpointError, UnfinishedError

DIRECT_FROM_BYTES = 8 << 20
"""Smaller files are in the page cache, or soon read."""


@dataclass(frozen=True, slots=True, order=True)
class Candidate:
    """A checkpoint that a tier may hold; newer ones are greater."""

    step: int
    generation: int

    @property
    def name(self) -> str:
        return folder_name(self.step, self.generation)


class Source(Protocol):
    """The files of one checkpoint, open for reading. Several threads read from it at once."""

    @property
    def streams(self) -> int:
        """So many threads at once make reading fastest."""
        ...

    @property
    def chunk_bytes(self) -> int:
        """So much in one piece makes it fastest: a power of two from 1 MiB on."""
        ...

    @property
    def fills_any(self) -> bool:
        """Whether `view` always fills `scratch`, which may then be any memory of `count` bytes."""
        ...

    def view(self, file: str, offset: int, count: int, scratch: memoryview) -> memoryview:
        """`count` bytes of `file` from `offset`, a page's beginning, on: memory that holds them, or `scratch`, filled.

        `scratch` begins on a page and has room for `count` rounded up to whole pages (`PAGE`).

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

    @property
    def far(self) -> bool:
        """Slow to ask, and holding only what was committed in a nearer one before: not asked while that one is good."""
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
            UnfinishedError: it was never committed.
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
    far: bool = False

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
            raise UnfinishedError("never committed: no manifest") from None
        except OSError as error:
            raise CheckpointError(f"{MANIFEST}: {error.strerror}") from None
        manifest = parse_manifest(data)
        check_owner(manifest, candidate)
        refuse_bad(folder)
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
    """Files of a folder, read past the page cache where they are large and the file system takes that."""

    streams, chunk_bytes, fills_any = 4, 4 << 20, False

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, int] = {}
        self._lock = threading.Lock()

    def view(self, file: str, offset: int, count: int, scratch: memoryview) -> memoryview:
        out = scratch[: -(-count // PAGE) * PAGE]
        done = 0
        try:
            handle = self._handle(file)
            while done < count:
                got = os.preadv(handle, [out[done:]], offset + done)
                if not got:
                    raise CheckpointError(f"{file}: ends at {offset + done}, {count - done} bytes early")
                done += got
        except OSError as error:
            raise CheckpointError(f"{file}: {error.strerror}") from None
        return scratch[:count]

    def _handle(self, file: str) -> int:
        with self._lock:
            if file not in self._open:
                path = self._folder / file
                large = path.stat().st_size >= DIRECT_FROM_BYTES
                self._open[file] = (
                    open_direct(path, os.O_RDONLY) if large else os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                )
            return self._open[file]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        while self._open:
            os.close(self._open.popitem()[1])


def open_direct(path: Path, flags: int) -> int:
    """Open for direct I/O; plainly where the file system takes none.

    Raises:
        OSError: it cannot be opened at all.
    """
    try:
        return os.open(path, flags | os.O_CLOEXEC | os.O_DIRECT, 0o644)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags | os.O_CLOEXEC, 0o644)
