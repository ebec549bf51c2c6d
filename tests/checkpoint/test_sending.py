"""Which checkpoints go to the store, which leave it, and what a run hears of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from folders import harm, write_checkpoint

from tidegate.checkpoint.courier import Courier
from tidegate.checkpoint.errand import Delivered, Errand
from tidegate.checkpoint.manifest import MANIFEST
from tidegate.checkpoint.marks import Mark, set_mark
from tidegate.checkpoint.object_store import ObjectStore
from tidegate.checkpoint.places import DiskPlace, marked
from tidegate.checkpoint.scrub import checked
from tidegate.checkpoint.sending import Wanted, deliver
from tidegate.checkpoint.tiers import Candidate
from tidegate.testing.faulty_proxy import Fault, FaultKind, FaultyProxy
from waiting import wait_until

Opener = Callable[..., ObjectStore]


def there(store: ObjectStore) -> list[str]:
    return sorted(candidate.name for candidate in store.candidates())


def delivered(disk: DiskPlace, store: ObjectStore, step: int, generation: int = 0, keep: int | None = 2) -> Delivered:
    write_checkpoint(disk.checkpoints, step, generation=generation, world_size=2)
    set_mark(disk.checkpoints / Candidate(step, generation).name, Mark.SENDING, "")
    return deliver(disk, store, Candidate(step, generation), keep=keep, generation=generation)


def test_the_store_keeps_the_newest_and_what_is_pinned(tmp_path: Path, open_store: Opener) -> None:
    disk, store = DiskPlace(tmp_path), open_store(run="r")
    assert delivered(disk, store, 100).error is None
    store.mark(Candidate(100, 0), Mark.PINNED, "good for ever")
    for step in (200, 300):
        assert delivered(disk, store, step).removed == ()
    assert delivered(disk, store, 400).removed == ("step-00000200.g0",)
    assert there(store) == ["step-00000100.g0", "step-00000300.g0", "step-00000400.g0"]
    assert marked(disk, Mark.SENDING) == []


def test_retention_leaves_alone_what_it_cannot_judge(tmp_path: Path, open_store: Opener) -> None:
    """What another generation sends still, what is bad, and what is newer than the last good one."""
    disk, store = DiskPlace(tmp_path), open_store(run="r")
    for step, generation in ((100, 1), (100, 2), (900, 1)):
        store.put(Candidate(step, generation), "shard-00001-model-00001-of-00001.safetensors", b"a part of it")
    other = Candidate(50, 0)
    store.put(other, MANIFEST, b"{")
    assert delivered(disk, store, 200, generation=1, keep=1).removed == ("step-00000100.g1",)
    assert there(store) == ["step-00000050.g0", "step-00000100.g2", "step-00000200.g1", "step-00000900.g1"]


def test_the_last_good_one_outlives_a_save_that_never_arrives(
    tmp_path: Path, open_store: Opener, proxy: FaultyProxy
) -> None:
    disk, store = DiskPlace(tmp_path), open_store(attempts=1, run="r")
    delivered(disk, store, 100, keep=1)
    proxy.faults.append(Fault(FaultKind.ERROR_500, method="PUT", path=MANIFEST))
    failed = delivered(disk, store, 200, keep=1)
    assert failed.error is not None
    assert "manifest.json: the store has an error of its own (HTTP 500)" in failed.error
    assert marked(disk, Mark.SENDING) == [Candidate(200, 0)], "it is on its way still"
    assert checked(store, Candidate(100, 0)).step == 100
    proxy.faults.clear()
    assert delivered(disk, store, 300, keep=1).removed == ("step-00000100.g0", "step-00000200.g0")


def test_a_store_that_deletes_nothing_fails_no_sending(tmp_path: Path, open_store: Opener, proxy: FaultyProxy) -> None:
    disk, store = DiskPlace(tmp_path), open_store(attempts=1, run="r")
    delivered(disk, store, 100)
    proxy.faults.append(Fault(FaultKind.FORBIDDEN, method="POST", path=r"\?delete"))
    done = delivered(disk, store, 200, keep=1)
    assert done.error is None
    assert done.not_removed is not None
    assert "refused" in done.not_removed


def test_what_is_rotten_is_not_sent_and_the_reason_is_one_line(tmp_path: Path, open_store: Opener) -> None:
    write_checkpoint(tmp_path, 100)
    harm(tmp_path / "step-00000100.g0", "cut")
    done = deliver(DiskPlace(tmp_path), open_store(), Candidate(100, 0), keep=None, generation=0)
    assert done.error is not None
    assert done.error.startswith("shard-00002")


def test_a_newer_one_takes_the_place_of_those_that_wait(tmp_path: Path) -> None:
    disk = DiskPlace(tmp_path)
    for step in (100, 200, 300):
        set_mark(write_checkpoint(tmp_path, step), Mark.SENDING, "")
    wanted = Wanted(disk)
    wanted.offer(Candidate(200, 0))
    wanted.offer(Candidate(100, 0))
    assert wanted.take() == Candidate(200, 0)
    assert marked(disk, Mark.SENDING) == [Candidate(200, 0), Candidate(300, 0)]


@pytest.fixture
def errand(tmp_path: Path, open_store: Opener, proxy: FaultyProxy) -> Errand:
    store = str(open_store().address)
    return Errand(checkpoints=str(tmp_path), store=store, endpoint=proxy.url, run="r", generation=0, attempts=1)


def test_a_sending_that_was_killed_goes_on(
    errand: Errand, tmp_path: Path, open_store: Opener, proxy: FaultyProxy
) -> None:
    """The process is killed in the middle, then the run is; nothing looks whole, and what arrived is not sent again."""
    disk, store = DiskPlace(tmp_path), open_store()
    for step in (100, 200):
        write_checkpoint(tmp_path, step)
    hang = Fault(FaultKind.HANG, method="PUT", path="shard-00003")
    proxy.faults.append(hang)
    courier = Courier(errand)
    courier.offer("step-00000100.g0")
    wait_until(lambda: hang.times < 1_000_000, 60, "it sends the third shard")
    assert courier._process is not None
    os.kill(courier._process.pid, signal.SIGKILL)
    (died,) = courier.wait(60)
    assert died.error == "the process that sends it has ended with -9"
    hang.times = 1_000_000
    courier.offer("step-00000200.g0")
    wait_until(lambda: hang.times < 1_000_000, 60, "another process sends the third shard of the next one")
    courier.close()
    assert marked(disk, Mark.SENDING) == [Candidate(200, 0)], "and of 100 nobody speaks any more"
    assert not any(MANIFEST in store.objects(candidate) for candidate in store.candidates())

    proxy.faults.clear()
    proxy.seen.clear()
    courier = Courier(errand)
    courier.offer(marked(disk, Mark.SENDING)[-1].name)
    (done,) = courier.wait(60)
    courier.close()
    assert (done.name, done.error) == ("step-00000200.g0", None)
    assert done.there_bytes > 0
    assert not [line for line in proxy.seen if line.startswith("PUT") and "shard-00001" in line]
    assert checked(store, Candidate(200, 0)).step == 200
    assert courier.under_way == ()
