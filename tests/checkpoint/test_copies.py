"""Copies in shared memory outlive the process that made them."""

from __future__ import annotations

import fcntl
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from folders import about, parts_of, tensors

from tidegate.checkpoint.disk import Saver
from tidegate.checkpoint.folders import LEFT_AFTER_S, SlotFolder, remove_leftovers, room_problem, seal_of
from tidegate.checkpoint.keeping import Keeping
from tidegate.checkpoint.layout import Part
from tidegate.checkpoint.memory import LocalShelf, Memory
from tidegate.checkpoint.restore import Restored, restore
from tidegate.checkpoint.ring import shared_ring
from tidegate.checkpoint.tiers import Candidate, Disk
from tidegate.train.parallel import joined
from waiting import wait_until


@pytest.fixture
def shared() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="tidegate-test-") as folder:
        yield Path(folder) / "run" / "node"


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    with joined(30) as world:
        yield world.saving


def saver_of(shared: Path, disk: Path, group: dist.ProcessGroup, parts: list[Part], **other: object) -> Saver:
    generation = int(str(other.pop("generation", 0)))
    ring = shared_ring(SlotFolder(shared), parts, rank=0, local_rank=0, newest=other.pop("restored", None))  # type: ignore[arg-type]
    return Saver(disk, parts, group=group, generation=generation, keep=2, ring=ring, **other)  # type: ignore[arg-type]


def set_to(saver: Saver, parts: list[Part], step: int) -> None:
    saver.wait_copied()
    for part, at in zip(parts, parts_of(tensors(step), 0, 1), strict=True):
        part.local.copy_(at.local)


def newest(shared: Path) -> int:
    return max(sealed.step for sealed in SlotFolder(shared).sealed().values())


def restored(shared: Path, disk: Path, group: dist.ProcessGroup) -> Restored:
    """What there is, after checking that it is that step's."""
    parts = parts_of(tensors(-1), 0, 1)
    found = restore([Memory([LocalShelf(shared)]), Disk(disk)], parts, group)
    if found.manifest is not None:
        want = parts_of(tensors(found.manifest.step), 0, 1)
        assert all(torch.equal(part.local, at.local) for part, at in zip(parts, want, strict=True))
    return found


def test_the_newest_copy_is_restored_before_the_disk(shared: Path, tmp_path: Path, group: dist.ProcessGroup) -> None:
    parts = parts_of(tensors(), 0, 1)
    saver = saver_of(shared, tmp_path, group, parts)
    for step in range(1, 8):
        set_to(saver, parts, step)
        saver.start(about(step), to_disk=step % 3 == 0)
    saver.finish()
    saver.close()
    found = restored(shared, tmp_path, group)
    assert (found.name, found.tier) == ("step-00000007.g0", "memory")
    assert sorted(SlotFolder(shared).sealed()) == [shared / "0.a", shared / "0.b"]
    assert [candidate.step for candidate in sorted(Disk(tmp_path).candidates())] == [3, 6]


def test_a_copy_that_is_cut_short_leaves_the_one_before(shared: Path, tmp_path: Path, group: dist.ProcessGroup) -> None:
    parts = parts_of(tensors(), 0, 1)
    saver = saver_of(shared, tmp_path, group, parts)
    for step in (1, 2):
        set_to(saver, parts, step)
        saver.start(about(step), to_disk=False)
    saver.close()
    ring = shared_ring(SlotFolder(shared), parts, rank=0, local_rank=0, newest=Candidate(2, 0))
    ring.take(last_is_good=False, busy=False).fill()  # and here the rank dies
    assert restored(shared, tmp_path, group).name == "step-00000002.g0"
    ring.close()


def test_a_copy_belongs_to_one_process(shared: Path) -> None:
    """A rank of an older generation that isn't dead keeps its copies; its successor does without, and says so."""
    parts = parts_of(tensors(), 0, 1)
    old = shared_ring(SlotFolder(shared), parts, rank=0, local_rank=0, newest=None)
    with pytest.raises(OSError, match=r"0\.a: another rank lives from it"):
        shared_ring(SlotFolder(shared), parts, rank=0, local_rank=0, newest=None)
    old.close()
    shared_ring(SlotFolder(shared), parts, rank=0, local_rank=0, newest=None).close()


def test_a_flipped_bit_in_memory_is_found_and_the_next_best_is_taken(
    shared: Path, tmp_path: Path, group: dist.ProcessGroup
) -> None:
    parts = parts_of(tensors(), 0, 1)
    saver = saver_of(shared, tmp_path, group, parts)
    for step in (1, 2):
        set_to(saver, parts, step)
        saver.start(about(step), to_disk=step == 1)
    saver.close()
    for path, sealed in SlotFolder(shared).sealed().items():
        if sealed.step == 2:
            with path.open("r+b") as file:
                file.seek(4100)
                file.write(b"\xff\xff")
    found = restored(shared, tmp_path, group)
    assert (found.name, found.tier) == ("step-00000001.g0", "memory")
    assert "content differs from its hash" in found.skipped[0].why
    SlotFolder(shared).remove()
    assert restored(shared, tmp_path, group).tier == "disk"


def test_copies_of_some_ranks_are_no_checkpoint(shared: Path, tmp_path: Path, group: dist.ProcessGroup) -> None:
    ring = shared_ring(SlotFolder(shared), parts_of(tensors(), 1, 2), rank=1, local_rank=0, newest=None)
    slot = ring.take(last_is_good=False, busy=False)
    slot.fill()
    slot.seal(about(5, world_size=2))
    found = restored(shared, tmp_path, group)
    assert found.manifest is None
    assert [(skipped.name, skipped.why) for skipped in found.skipped] == [
        ("step-00000005.g0", "1 of 2 ranks' copies are there")
    ]
    ring.close()


@pytest.mark.parametrize("when_late", ["wait", "skip"])
def test_a_save_that_is_due_while_the_one_before_is_late(
    shared: Path, tmp_path: Path, group: dist.ProcessGroup, when_late: str
) -> None:
    """The writer is held up: the copies in memory go on, the one that is being written stays as it was."""
    parts = parts_of(tensors(), 0, 1)
    saver = saver_of(shared, tmp_path, group, parts, when_late=when_late)
    set_to(saver, parts, 1)
    saver.start(about(1))
    saver.finish()
    assert saver.writer_pid is not None
    os.kill(saver.writer_pid, signal.SIGSTOP)
    set_to(saver, parts, 2)
    saver.start(about(2))
    for step in (3, 4, 5):
        set_to(saver, parts, step)
        assert saver.start(about(step), to_disk=False) is None
    wait_until(lambda: newest(shared) == 5, 10, "the copy of step 5")
    assert restored(shared, tmp_path, group).name == "step-00000005.g0"
    set_to(saver, parts, 6)
    if when_late == "skip":
        late = saver.start(about(6))
        assert late is not None
        assert (late.step, late.skipped) == (6, True)
        assert saver.poll() is None
        wait_until(lambda: newest(shared) == 6, 10, "the copy of step 6")
        assert restored(shared, tmp_path, group).name == "step-00000006.g0"
        os.kill(saver.writer_pid, signal.SIGCONT)
    else:
        os.kill(saver.writer_pid, signal.SIGCONT)
        before = saver.start(about(6))
        assert before is not None
        assert (before.step, before.error) == (2, None)
    saver.finish()
    saver.close()
    SlotFolder(shared).remove()
    on_disk = restored(shared, tmp_path, group)
    assert (on_disk.name, on_disk.skipped) == ("step-00000002.g0" if when_late == "skip" else "step-00000006.g0", ())


def test_a_writer_that_is_killed_costs_one_save(shared: Path, tmp_path: Path, group: dist.ProcessGroup) -> None:
    saver = saver_of(shared, tmp_path, group, parts_of(tensors(), 0, 1))
    saver.start(about(1))
    saver.finish()
    assert saver.writer_pid is not None
    os.kill(saver.writer_pid, signal.SIGKILL)
    saver.start(about(2))
    failed = saver.finish()
    assert failed is not None
    assert failed.error is not None
    assert "the writer has ended with -9" in failed.error
    saver.start(about(3))
    outcome = saver.finish()
    assert outcome is not None
    assert outcome.error is None
    saver.close()


def test_a_copy_in_memory_that_fails_is_told_and_the_run_goes_on(
    shared: Path, tmp_path: Path, group: dist.ProcessGroup
) -> None:
    saver = saver_of(shared, tmp_path, group, parts_of(tensors(), 0, 1))
    in_the_way = shared / f".{seal_of(shared / '0.a').name}.{os.getpid()}"
    in_the_way.mkdir()
    saver.start(about(1), to_disk=False)
    told = saver.start(about(2), to_disk=False)
    assert told is not None
    assert told.step == 1
    assert (told.error or "").startswith("copy in memory: ")
    in_the_way.rmdir()
    saver.start(about(3), to_disk=False)
    assert saver.start(about(4)) is None
    outcome = saver.finish()
    assert outcome is not None
    assert outcome.error is None
    saver.close()


def test_without_room_in_shared_memory_there_is_the_disk_alone(tmp_path: Path, group: dist.ProcessGroup) -> None:
    """A state of three times what is free, of which nothing is ever touched."""
    room = os.statvfs("/dev/shm")
    huge = torch.empty(1).expand(3 * room.f_bavail * room.f_frsize // 4 // 2)
    parts = [Part("model.huge", huge, tuple(huge.shape), (0,))]
    environment = {"TIDEGATE_NODE": "node"}
    keeping = Keeping("huge", tmp_path, environment, in_memory=True)
    ring, problem = keeping.ring(parts, None, group)
    assert ring is None
    assert problem is not None
    assert "bytes wanted" in problem
    keeping.forget()


def test_room_that_older_copies_take_counts_as_free(shared: Path) -> None:
    shared.mkdir(parents=True)
    paths = [shared / "0.a", shared / "0.b"]
    paths[0].write_bytes(bytes(1 << 20))
    room = os.statvfs(shared)
    free = room.f_bavail * room.f_frsize
    assert room_problem(paths, 1 << 20) is None
    assert room_problem(paths, free) is not None


def test_leftovers_of_dead_runs_go_and_no_others(shared: Path) -> None:
    root = shared.parent.parent
    held, fresh, dead, own = (SlotFolder(root / run / "node") for run in ("held", "fresh", "dead", "own"))
    for folder in (held, fresh, dead, own):
        folder.hold()
        if folder is not held:
            folder.let_go()
        old = time.time() - 2 * LEFT_AFTER_S
        for path in (folder.path / "lock", folder.path):
            if folder is not fresh:
                os.utime(path, (old, old))
    assert remove_leftovers(root, time.time(), spare=own.path) == [dead.path]
    assert sorted(path.parent.name for path in root.glob("*/node")) == ["fresh", "held", "own"]
    held.let_go()
    with (held.path / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
