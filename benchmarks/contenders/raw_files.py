"""What the disk can do: direct I/O in several streams, from and to memory that is warm, with nothing beside it."""

from __future__ import annotations

import itertools
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path

STREAMS = 4
CHUNK_BYTES = 4 << 20
_PAGE = 4096


def write_direct(path: Path, count: int) -> None:
    """Write a file of `count` bytes and make it durable. Where the file system takes no direct I/O, plainly."""
    memory = memoryview(mmap.mmap(-1, STREAMS * CHUNK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_POPULATE))
    handle = _opened(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        os.posix_fallocate(handle, 0, count)

        def put(stream: int, at: int, length: int) -> None:
            begin = stream * CHUNK_BYTES
            done = 0
            while done < length:
                done += os.pwrite(handle, memory[begin + done : begin + length], at + done)

        _in_streams(put, -(-count // _PAGE) * _PAGE)
        os.ftruncate(handle, count)
        os.fsync(handle)
    finally:
        os.close(handle)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def read_direct(path: Path) -> int:
    """Read a whole file into memory that is used again for every piece; its size."""
    memory = memoryview(mmap.mmap(-1, STREAMS * CHUNK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_POPULATE))
    handle = _opened(path, os.O_RDONLY)
    try:
        count = os.fstat(handle).st_size

        def get(stream: int, at: int, length: int) -> None:
            begin = stream * CHUNK_BYTES
            os.preadv(handle, [memory[begin : begin + length]], at)

        _in_streams(get, -(-count // _PAGE) * _PAGE)
        return count
    finally:
        os.close(handle)


def _opened(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_DIRECT, 0o644)
    except OSError:
        return os.open(path, flags, 0o644)


def _in_streams(move: Callable[[int, int, int], None], count: int) -> None:
    chunks = itertools.count(0, CHUNK_BYTES)
    errors: list[OSError] = []

    def stream(number: int) -> None:
        for at in chunks:
            if at >= count or errors:
                return
            try:
                move(number, at, min(CHUNK_BYTES, count - at))
            except OSError as error:
                errors.append(error)

    threads = [threading.Thread(target=stream, args=(number,)) for number in range(STREAMS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
