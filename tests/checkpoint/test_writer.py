"""The process that brings saves to disk: it leaves the disk alone for a part of the time, until somebody waits."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tidegate.checkpoint.writer import PacedFile, Writer

SIZE, HEADER = (9 << 20) + 17, 4096


@pytest.fixture
def memory() -> Iterator[tuple[int, memoryview]]:
    handle = os.memfd_create("test")
    padded = -(-SIZE // 4096) * 4096
    os.ftruncate(handle, padded)
    view = memoryview(mmap.mmap(handle, padded))
    view[:SIZE] = os.urandom(SIZE)
    yield handle, view
    os.close(handle)


def test_after_each_write_its_stream_rests(tmp_path: Path, memory: tuple[int, memoryview]) -> None:
    rests: list[float] = []
    file = PacedFile(tmp_path / "file", memory[1], SIZE, rests.append)
    file.write(0, len(memory[1]))
    file.finish()
    file.close()
    assert (tmp_path / "file").read_bytes() == memory[1][:SIZE]
    assert len(rests) == 3, "4 MiB each"
    assert all(seconds > 0 for seconds in rests)


def test_one_may_wait_at_any_time(tmp_path: Path, memory: tuple[int, memoryview]) -> None:
    """Before a file, in the middle of it, twice, after it, and when the writer has gone: nothing is lost by it."""
    handle, view = memory
    writer = Writer()
    writer.hurry()
    for name in ("first", "second"):
        writer.begin(handle, SIZE, HEADER, tmp_path / name)
        writer.hurry()
        writer.hurry()
        writer.end()
        writer.hurry()
        assert (tmp_path / name).read_bytes() == view[:SIZE]
    writer.close()
    writer.hurry()
