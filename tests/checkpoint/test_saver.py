"""Saves beside training, in a world of one."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from folders import about, parts_of, tensors

from small_disk import fill_up, small_disk
from tidegate.checkpoint.disk import Outcome, Saver
from tidegate.checkpoint.layout import Part
from tidegate.checkpoint.restore import load, newest_good
from tidegate.checkpoint.ring import Ring
from tidegate.checkpoint.slots import Slot
from tidegate.train.parallel import joined


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    with joined(30) as world:
        yield world.saving


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "small", kib=256) as place:
        yield place


def save(saver: Saver, step: int, generation: int = 0) -> Outcome:
    assert saver.start(about(step, generation)) is None
    outcome = saver.finish()
    assert outcome is not None
    return outcome


def saver_of(folder: Path, group: dist.ProcessGroup, parts: list[Part], keep: int = 2) -> Saver:
    return Saver(folder, parts, group=group, generation=0, keep=keep, clock=lambda: 1234.5)


def test_saves_are_committed_and_the_old_ones_leave(tmp_path: Path, group: dist.ProcessGroup) -> None:
    parts = parts_of(tensors(), 0, 1)
    saver = saver_of(tmp_path, group, parts)
    for step in (20, 40, 60):
        outcome = save(saver, step)
        assert outcome.error is None
        assert 0 <= outcome.stall_s <= outcome.commit_s
    saver.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000040.g0", "step-00000060.g0"]
    found = newest_good(tmp_path)
    assert found.checkpoint is not None
    manifest = found.checkpoint.manifest
    assert (manifest.step, manifest.at_s, manifest.total_bytes) == (60, 1234.5, outcome.bytes)


def test_training_goes_on_while_a_save_flies(tmp_path: Path, group: dist.ProcessGroup) -> None:
    """C061, through the saver: the weights change once they are copied, the file holds what they were."""
    parts = parts_of(tensors(), 0, 1)
    saver = saver_of(tmp_path, group, parts)
    saver.start(about(20))
    saver.wait_copied()
    assert not saver.copying
    for part in parts:
        part.local.add_(1)
    assert saver.finish() is not None
    saver.close()
    found = newest_good(tmp_path).checkpoint
    assert found is not None
    read = parts_of({name: torch.zeros_like(tensor) for name, tensor in tensors().items()}, 0, 1)
    load(found, read)
    assert all(torch.equal(part.local, tensors()[part.name]) for part in read)


class Gated(Slot):
    """Copies when it may."""

    def __init__(self, parts: list[Part]) -> None:
        super().__init__(parts, rank=0)
        self.gate = threading.Event()

    def fill(self) -> None:
        assert self.gate.wait(30)
        super().fill()


def test_a_step_computes_while_a_copy_is_made_and_its_update_waits(tmp_path: Path, group: dist.ProcessGroup) -> None:
    parts = parts_of(tensors(), 0, 1)
    slot = Gated(parts)
    ring = Ring(lambda _: slot)
    saver = Saver(tmp_path, parts, group=group, generation=0, keep=2, ring=ring)
    saver.start(about(20))
    assert saver.copying

    def update() -> None:
        saver.wait_copied()
        for part in parts:
            part.local.add_(1)

    updating = threading.Thread(target=update)
    updating.start()
    assert not (tmp_path / "step-00000020.g0" / "manifest.json").exists()
    slot.gate.set()
    updating.join(30)
    outcome = saver.finish()
    saver.close()
    assert outcome is not None
    assert outcome.error is None
    found = newest_good(tmp_path).checkpoint
    assert found is not None
    read = parts_of({name: torch.zeros_like(tensor) for name, tensor in tensors().items()}, 0, 1)
    load(found, read)
    assert all(torch.equal(part.local, tensors()[part.name]) for part in read)


def test_a_full_disk_costs_one_save(disk: Path, group: dist.ProcessGroup) -> None:
    """C058: save(40) fails in the writer; its reason comes out, save(20) stays, save(60) works."""
    saver = saver_of(disk, group, parts_of(tensors(), 0, 1))
    assert save(saver, 20).error is None
    fill_up(disk)
    outcome = save(saver, 40)
    assert outcome.error is not None
    assert outcome.error.startswith(f"rank 0: {os.strerror(errno.ENOSPC)}: {disk / 'step-00000040.g0'}")
    assert outcome.full
    found = newest_good(disk)
    assert found.checkpoint is not None
    assert found.checkpoint.manifest.step == 20
    (disk / "filler").unlink()
    assert save(saver, 60).error is None
    saver.close()
    assert sorted(path.name for path in disk.iterdir()) == ["step-00000020.g0", "step-00000060.g0"]


def test_on_a_full_disk_older_checkpoints_make_room(disk: Path, group: dist.ProcessGroup) -> None:
    """C065: the last save finds the disk full; all but the newest good checkpoint go, and done again it fits."""
    saver = saver_of(disk, group, parts_of(tensors(), 0, 1), keep=9)
    assert [save(saver, step).error for step in (20, 40, 60)] == [None] * 3
    fill_up(disk)
    assert save(saver, 80).full
    assert sorted(path.name for path in disk.glob("step-*")) == ["step-00000060.g0"]
    assert save(saver, 80).error is None
    saver.close()
    found = newest_good(disk).checkpoint
    assert found is not None
    assert found.manifest.step == 80


def test_a_folder_that_was_committed_is_not_written_into(tmp_path: Path, group: dist.ProcessGroup) -> None:
    """C070: two saves never share a folder."""
    saver = saver_of(tmp_path, group, parts_of(tensors(), 0, 1))
    assert save(saver, 20).error is None
    outcome = save(saver, 20)
    assert outcome.error is not None
    assert "a restart must raise the generation" in outcome.error
    saver.close()
    assert newest_good(tmp_path).checkpoint is not None


def test_a_rotten_checkpoint_is_not_kept_in_place_of_a_good_one(tmp_path: Path, group: dist.ProcessGroup) -> None:
    """Step 40 did not verify, the run went on from 20: with keep 1 the new step 30 must stay."""
    parts = parts_of(tensors(), 0, 1)
    saver = saver_of(tmp_path, group, parts)
    save(saver, 40)
    saver.close()
    rotten = frozenset({"step-00000040.g0"})
    again = Saver(tmp_path, parts, group=group, generation=1, keep=1, rotten=rotten)
    assert save(again, 30, generation=1).error is None
    again.close()
    assert (tmp_path / "step-00000030.g1" / "manifest.json").exists()


def test_the_next_save_tells_how_the_one_before_ended(tmp_path: Path, group: dist.ProcessGroup) -> None:
    saver = saver_of(tmp_path, group, parts_of(tensors(), 0, 1))
    assert saver.start(about(20)) is None
    before = saver.start(about(40))
    assert before is not None
    assert (before.step, before.error) == (20, None)
    last = saver.finish()
    assert last is not None
    assert last.step == 40
    assert saver.finish() is None is saver.poll()
    saver.close()
