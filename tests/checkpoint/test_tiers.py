"""What a tier says about itself."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest
from folders import write_checkpoint

from tidegate.checkpoint.manifest import MANIFEST
from tidegate.checkpoint.tiers import PAGE, Candidate, Disk
from tidegate.errors import CheckpointError


def test_a_disk_lists_checkpoints_and_nothing_else(tmp_path: Path) -> None:
    assert Disk(tmp_path / "none").candidates() == ()
    write_checkpoint(tmp_path, 20)
    write_checkpoint(tmp_path, 40, generation=3)
    (tmp_path / "notes.txt").write_text("")
    assert sorted(Disk(tmp_path).candidates()) == [Candidate(20, 0), Candidate(40, 3)]


def test_a_place_that_cannot_be_listed_says_why(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(CheckpointError, match="checkpoints: Not a directory"):
        Disk(tmp_path / "checkpoints").candidates()


def test_a_shard_is_read_from_any_offset_and_its_early_end_is_said(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, 20)
    disk, candidate = Disk(tmp_path), Candidate(20, 0)
    file = disk.manifest(candidate).files[1]
    scratch = memoryview(mmap.mmap(-1, PAGE))
    before = len(os.listdir("/proc/self/fd"))
    with disk.source(candidate) as source:
        assert source.view(file.name, 7, 50, scratch) == (folder / file.name).read_bytes()[7:57]
        with pytest.raises(CheckpointError, match=rf"{file.name}: ends at {file.bytes}, 40 bytes early"):
            source.view(file.name, file.bytes - 10, 50, scratch)
        with pytest.raises(CheckpointError, match="other: No such file"):
            source.view("other", 0, 50, scratch)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(("harm", "says"), [("lose", "never committed: no manifest"), ("cut", "bytes, must be")])
def test_what_is_wrong_without_reading_it(tmp_path: Path, harm: str, says: str) -> None:
    folder = write_checkpoint(tmp_path, 20)
    if harm == "lose":
        (folder / MANIFEST).unlink()
    else:
        shard = next(folder.glob("*.safetensors"))
        shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=says):
        Disk(tmp_path).manifest(Candidate(20, 0))
