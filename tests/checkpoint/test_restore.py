"""The newest checkpoint that verifies."""

from __future__ import annotations

from pathlib import Path

import pytest
from folders import write_checkpoint

from tidegate.checkpoint.manifest import MANIFEST
from tidegate.checkpoint.restore import Found, newest_good


def chosen(found: Found) -> str | None:
    return found.checkpoint.folder.name if found.checkpoint else None


def test_the_newest_by_step_and_then_by_generation(tmp_path: Path) -> None:
    for step, generation in ((20, 0), (100, 0), (100, 2), (60, 3)):
        write_checkpoint(tmp_path, step, generation=generation)
    found = newest_good(tmp_path)
    assert chosen(found) == "step-00000100.g2"
    assert found.skipped == ()


def test_no_checkpoints(tmp_path: Path) -> None:
    assert newest_good(tmp_path / "none") == newest_good(tmp_path) == Found(None, ())


def test_a_save_that_was_cut_short_is_skipped_by_name(tmp_path: Path) -> None:
    """C050: the shards are there, the manifest is not."""
    write_checkpoint(tmp_path, 100)
    (write_checkpoint(tmp_path, 200) / MANIFEST).unlink()
    found = newest_good(tmp_path)
    assert chosen(found) == "step-00000100.g0"
    assert [str(skipped) for skipped in found.skipped] == ["step-00000200.g0: never committed: no manifest"]


def test_after_power_loss_the_newest_are_empty_files(tmp_path: Path) -> None:
    """C053: 418 is good, 420 and 422 have nothing but empty files, and there is no pointer to the latest."""
    write_checkpoint(tmp_path, 418)
    for step in (420, 422):
        for file in write_checkpoint(tmp_path, step).iterdir():
            file.write_bytes(b"")
    found = newest_good(tmp_path)
    assert chosen(found) == "step-00000418.g0"
    assert [skipped.name for skipped in found.skipped] == ["step-00000422.g0", "step-00000420.g0"]


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        ("flip", "content differs from its hash at byte"),
        ("cut", "bytes, must be"),
        ("lose", "No such file or directory"),
        ("manifest", "manifest.json: "),
        ("rename", "manifest.json is of step 200, generation 0"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, harm: str, says: str) -> None:
    """C052: "whole" means every file with its size and hash, and a manifest that belongs to the folder."""
    write_checkpoint(tmp_path, 100)
    folder = write_checkpoint(tmp_path, 200)
    shard = folder / "shard-00002-model-00001-of-00001.safetensors"
    data = bytearray(shard.read_bytes())
    if harm == "flip":
        data[-1] ^= 1
        shard.write_bytes(data)
    elif harm == "cut":
        shard.write_bytes(data[:-1])
    elif harm == "lose":
        shard.unlink()
    elif harm == "manifest":
        (folder / MANIFEST).write_text((folder / MANIFEST).read_text()[:-20])
    else:
        folder.rename(tmp_path / "step-00000300.g0")
    found = newest_good(tmp_path)
    assert chosen(found) == "step-00000100.g0"
    assert len(found.skipped) == 1
    assert says in found.skipped[0].why
