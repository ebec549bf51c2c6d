"""Files that must survive a power cut: written, synced, listed with size and hash, checked against that list."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from tidegate.spec.policy import Model


class FileSeen(Model):
    """A file as it was when its folder was committed."""

    name: str
    """Path inside the folder, with forward slashes."""
    bytes: int
    sha256: str


def folder_files(folder: Path) -> tuple[FileSeen, ...]:
    """All files below `folder`, sorted by name."""
    return tuple(
        FileSeen(name=path.relative_to(folder).as_posix(), bytes=path.stat().st_size, sha256=sha256_of(path))
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    )


def file_problem(folder: Path, seen: FileSeen) -> str | None:
    """What is wrong with a listed file, None if it is what it was."""
    path = folder / seen.name
    try:
        size = path.stat().st_size
        if size != seen.bytes:
            return f"{seen.name}: {size} bytes, must be {seen.bytes}"
        if sha256_of(path) != seen.sha256:
            return f"{seen.name}: content differs from the manifest's hash"
    except OSError as error:
        return f"{seen.name}: {error.strerror}"
    return None


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_synced(path: Path, data: bytes | memoryview) -> None:
    """Write `path` so that it appears whole or not at all: a neighbour is written, synced and renamed over it."""
    neighbour = path.with_name(f".{path.name}.{os.getpid()}")
    with neighbour.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    neighbour.rename(path)
    sync_folder(path.parent)


def write_renamed(path: Path, data: bytes) -> None:
    """As `write_synced`, for memory: nothing is made durable."""
    neighbour = path.with_name(f".{path.name}.{os.getpid()}")
    neighbour.write_bytes(data)
    neighbour.rename(path)


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Make all below `folder` durable."""
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
    for path in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        sync_folder(path)
