"""When a restore asks the object store, and what it takes from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from folders import harm, parts_of, tensors, write_checkpoint

from tidegate.checkpoint.manifest import MANIFEST
from tidegate.checkpoint.object_store import ObjectStore
from tidegate.checkpoint.places import DiskPlace
from tidegate.checkpoint.restore import Restored, restore
from tidegate.checkpoint.tiers import Candidate
from tidegate.checkpoint.upload import send
from tidegate.testing.faulty_proxy import Fault, FaultKind, FaultyProxy
from tidegate.train.parallel import joined

Opener = Callable[..., ObjectStore]


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    with joined(30) as world:
        yield world.saving


@pytest.fixture
def disk(tmp_path: Path, open_store: Opener, proxy: FaultyProxy) -> DiskPlace:
    """Steps 100 and 200, on disk and in the store."""
    disk = DiskPlace(tmp_path)
    for step in (100, 200):
        write_checkpoint(tmp_path, step)
        send(disk, open_store(), Candidate(step, 0))
    proxy.seen.clear()
    return disk


def restored(disk: DiskPlace, store: ObjectStore, group: dist.ProcessGroup) -> Restored:
    """By one rank, of what four have saved; after checking the content."""
    parts = parts_of(tensors(-1), 0, 1)
    found = restore([disk, store], parts, group)
    if found.manifest is not None:
        want = parts_of(tensors(found.manifest.step), 0, 1)
        assert all(torch.equal(part.local, at.local) for part, at in zip(parts, want, strict=True))
    return found


def test_a_disk_that_is_well_asks_nobody(
    disk: DiskPlace, open_store: Opener, proxy: FaultyProxy, group: dist.ProcessGroup
) -> None:
    """Nor does a save that a crash cut short: the store has nothing that the disk had not. So no restart waits for a
    store that is down."""
    (write_checkpoint(disk.checkpoints, 300) / MANIFEST).unlink()
    found = restored(disk, open_store(), group)
    assert (found.name, found.tier) == ("step-00000200.g0", "disk")
    assert proxy.seen == []


@pytest.mark.parametrize("how", ["flip", "cut", "lose"])
def test_what_rots_on_disk_comes_from_the_store(
    how: str, disk: DiskPlace, open_store: Opener, group: dist.ProcessGroup
) -> None:
    harm(disk.checkpoints / "step-00000200.g0", how)
    found = restored(disk, open_store(), group)
    assert (found.name, found.tier) == ("step-00000200.g0", "s3")
    assert [(one.name, one.tier) for one in found.skipped] == [("step-00000200.g0", "disk")]


def test_only_what_is_needed_is_fetched(
    disk: DiskPlace, open_store: Opener, proxy: FaultyProxy, group: dist.ProcessGroup, tmp_path: Path
) -> None:
    """The weights alone, of shards that hold the moments too: no more than 5 % over their bytes and the headers."""
    write_checkpoint(tmp_path / "big", 900, world_size=2, rows=200_000)
    store = open_store()
    send(DiskPlace(tmp_path / "big"), store, Candidate(900, 0))
    whole = tensors(0, 200_000)
    parts = [part for part in parts_of(whole, 0, 1) if part.name == "model.even"]
    found = restore([store], parts, group)
    assert found.manifest is not None
    headers = sum(file.header_bytes for file in found.manifest.files)
    assert found.bytes - headers <= 1.05 * parts[0].local.nbytes
    assert torch.equal(parts[0].local, tensors(900, 200_000)["model.even"])


def test_a_store_that_does_not_answer_is_told_and_the_disk_is_used(
    disk: DiskPlace, open_store: Opener, proxy: FaultyProxy, group: dist.ProcessGroup
) -> None:
    harm(disk.checkpoints / "step-00000200.g0", "flip")
    proxy.faults.append(Fault(FaultKind.BARE_503))
    found = restored(disk, open_store(attempts=1), group)
    assert (found.name, found.tier) == ("step-00000100.g0", "disk")
    assert [(one.name, one.tier) for one in found.skipped] == [("step-00000200.g0", "disk"), ("all", "s3")]
    assert "throttled (HTTP 503)" in found.skipped[1].why


def test_a_part_of_an_upload_is_no_checkpoint(
    disk: DiskPlace, open_store: Opener, group: dist.ProcessGroup, tmp_path: Path
) -> None:
    """C050: shards without a manifest, newer than all others, and the disk is lost."""
    store = open_store()
    store.put(Candidate(300, 1), "shard-00001-model-00001-of-00001.safetensors", b"half of it")
    found = restored(DiskPlace(tmp_path / "none"), store, group)
    assert (found.name, found.tier) == ("step-00000200.g0", "s3")
    assert [str(one) for one in found.skipped] == ["step-00000300.g1: never committed: no manifest"]
