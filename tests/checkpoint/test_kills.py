"""A rank that is killed at any point of a save: the newest checkpoint that loads never goes back by more than one."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from folders import about, parts_of, tensors

from tidegate.checkpoint.disk import Saver
from tidegate.checkpoint.folders import SlotFolder
from tidegate.checkpoint.layout import Part
from tidegate.checkpoint.manifest import MANIFEST
from tidegate.checkpoint.memory import LocalShelf, Memory
from tidegate.checkpoint.restore import newest_good, restore
from tidegate.checkpoint.ring import shared_ring
from tidegate.checkpoint.tiers import Candidate, Disk, Tier
from tidegate.train.parallel import joined

PACKAGE = str(Path(sys.modules[Saver.__module__].__file__ or "").parent)


class KillAt:
    """Kills this process at the n-th call of one of our checkpoint's functions, in whichever thread."""

    def __init__(self, count: int) -> None:
        self.left = count
        self._lock = threading.Lock()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            with self._lock:
                self.left -= 1
                if self.left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)


def saves(shared: Path, disk: Path, kill_at: int, told: Any) -> None:
    """Save steps 1 and 2, then step 3, and be killed in it; without a kill tell how many calls it took."""
    torch.set_num_threads(1)
    kill = KillAt(kill_at or 1_000_000)
    with joined(30) as world:
        parts = parts_of(tensors(), 0, 1)
        ring = shared_ring(SlotFolder(shared), parts, rank=0, local_rank=0, newest=None)
        saver = Saver(disk, parts, group=world.saving, generation=0, keep=1, ring=ring)
        for step in (1, 2, 3):
            for part, at in zip(parts, parts_of(tensors(step), 0, 1), strict=True):
                part.local.copy_(at.local)
            if step == 3:
                sys.setprofile(kill)
                threading.setprofile_all_threads(kill) if sys.version_info >= (3, 12) else _profile_threads(saver, kill)
            saver.start(about(step))
            saver.finish()
        sys.setprofile(None)
        told.send(1_000_000 - kill.left)
        saver.close()


def _profile_threads(saver: Saver, kill: KillAt) -> None:
    """Python 3.11 sets a profile function only from within a thread."""
    for threads in (saver._copier, saver._thread):
        threads.submit(sys.setprofile, kill).result()


@pytest.fixture
def shared() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="tidegate-test-") as folder:
        yield Path(folder) / "run" / "node"


def one(shared: Path, disk: Path, kill_at: int) -> tuple[int | None, int]:
    """Exit code, and calls of the third save."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tidegate.checkpoint.keeping", "tidegate.train.parallel"])
    ours, theirs = context.Pipe()
    process = context.Process(target=saves, args=(shared, disk, kill_at, theirs))
    process.start()
    theirs.close()
    process.join(30)
    assert process.exitcode is not None, "still running"
    return process.exitcode, ours.recv() if process.exitcode == 0 else 0


def test_killed_at_every_phase_of_a_save(shared: Path, tmp_path: Path) -> None:
    code, calls = one(shared, tmp_path / "calls", 0)
    assert code == 0
    assert calls > 30
    points = sorted({1 + calls * number // 12 for number in range(12)} | {calls - 2})
    seen = set()
    with joined(30) as world:
        for point in points:
            shutil.rmtree(shared)
            disk = tmp_path / str(point)
            # Threads make a few calls more or less: the last kill may come too late.
            assert one(shared, disk, point)[0] in (-signal.SIGKILL, 0), f"call {point} of {calls}"
            both: list[Tier] = [Memory([LocalShelf(shared)]), Disk(disk)]
            for tiers in (both, both[1:]):
                parts = parts_of(tensors(-1), 0, 1)
                found = restore(tiers, parts, world.saving)
                assert found.manifest is not None, f"call {point} of {calls}"
                assert found.manifest.step in (2, 3)
                want = parts_of(tensors(found.manifest.step), 0, 1)
                assert all(torch.equal(part.local, at.local) for part, at in zip(parts, want, strict=True))
                seen.add((len(tiers), found.manifest.step))
    # A kill came before and after the point from which on the third counts, in memory and on disk.
    assert seen == {(2, 2), (2, 3), (1, 2), (1, 3)}


def parts_at(step: int) -> list[Part]:
    return parts_of(tensors(step), 0, 1)


def test_a_late_writer_of_an_older_generation_harms_nobody(tmp_path: Path) -> None:
    """Generation 0 was thought dead and commits its step 40 after generation 1 went on from 20 and saved its own 40."""
    with joined(30) as world:
        old = Saver(tmp_path, parts_at(7), group=world.saving, generation=0, keep=3)
        new = Saver(tmp_path, parts_at(40), group=world.saving, generation=1, keep=3)
        new.start(about(40, 1))
        new.finish()
        old.start(about(40, 0))
        late = old.finish()
        assert late is not None
        assert late.error is None
        old.close()
        new.close()
        parts = parts_at(-1)
        found = restore([Disk(tmp_path)], parts, world.saving)
    assert found.name == "step-00000040.g1"
    assert torch.equal(parts[0].local, parts_at(40)[0].local)


def test_a_clock_that_jumps_changes_nothing(tmp_path: Path) -> None:
    """Newer is what has more steps, whatever the clock said when it was committed."""
    times = iter([5e9, 1e9, 0.0])
    with joined(30) as world:
        saver = Saver(tmp_path, parts_at(1), group=world.saving, generation=0, keep=2, clock=lambda: next(times))
        for step in (20, 40, 60):
            saver.start(about(step))
            saver.finish()
        saver.close()
    assert sorted(Disk(tmp_path).candidates()) == [Candidate(40, 0), Candidate(60, 0)]
    found = newest_good(tmp_path).checkpoint
    assert found is not None
    assert (found.manifest.step, found.manifest.at_s) == (60, 0.0)


def test_what_cannot_be_read_is_skipped_with_the_reason(tmp_path: Path) -> None:
    """A folder that cannot be entered, a manifest that is none, and a tier that cannot be looked through at all."""
    with joined(30) as world:
        saver = Saver(tmp_path / "disk", parts_at(20), group=world.saving, generation=0, keep=9)
        for step in (20, 40):
            saver.start(about(step))
            saver.finish()
        saver.close()
        manifest = tmp_path / "disk" / "step-00000040.g0" / MANIFEST
        manifest.unlink()
        manifest.mkdir()
        (tmp_path / "disk" / "step-00000060.g0").symlink_to("step-00000060.g0")
        (tmp_path / "loop").symlink_to("loop")
        parts = parts_at(-1)
        found = restore([Disk(tmp_path / "loop", "memory"), Disk(tmp_path / "disk")], parts, world.saving)
    assert found.name == "step-00000020.g0"
    assert [(skipped.tier, skipped.name) for skipped in found.skipped] == [
        ("memory", "all"),
        ("disk", "step-00000060.g0"),
        ("disk", "step-00000040.g0"),
    ]
    whys = [skipped.why for skipped in found.skipped]
    assert "Too many levels of symbolic links" in whys[0]
    assert "Too many levels of symbolic links" in whys[1]
    assert "Is a directory" in whys[2]
    assert dist.is_initialized() is False
