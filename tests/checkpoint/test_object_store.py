"""The object store's tier, against moto's server over HTTP, with faults on the way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from botocore.exceptions import ClientError
from folders import harm, write_checkpoint

from tidegate.checkpoint.address import parse_address
from tidegate.checkpoint.manifest import MANIFEST
from tidegate.checkpoint.object_store import ObjectStore
from tidegate.checkpoint.places import DiskPlace
from tidegate.checkpoint.scrub import checked
from tidegate.checkpoint.store_errors import StoreError, Trouble, classify, store_error
from tidegate.checkpoint.tiers import Candidate
from tidegate.checkpoint.upload import send
from tidegate.errors import CheckpointError
from tidegate.testing.faulty_proxy import Fault, FaultKind, FaultyProxy

Opener = Callable[..., ObjectStore]
AT_200 = Candidate(200, 0)


@pytest.fixture
def disk(tmp_path: Path) -> DiskPlace:
    write_checkpoint(tmp_path, 200)
    return DiskPlace(tmp_path)


def puts(proxy: FaultyProxy, name: str = "") -> list[str]:
    return [line for line in proxy.seen if line.startswith("PUT ") and name in line]


def is_whole(store: ObjectStore, candidate: Candidate = AT_200) -> bool:
    try:
        checked(store, candidate)
    except CheckpointError:
        return False
    return True


def test_sent_and_read_back(disk: DiskPlace, open_store: Opener, proxy: FaultyProxy) -> None:
    store = open_store()
    assert store.candidates() == ()
    sent = send(disk, store, AT_200)
    assert sent.sent_bytes == disk.manifest(AT_200).total_bytes
    assert puts(proxy)[-1].endswith(MANIFEST), "the manifest goes last"
    assert store.candidates() == (AT_200,)
    assert checked(store, AT_200) == disk.manifest(AT_200)
    file = disk.manifest(AT_200).files[2]
    with store.source(AT_200) as source:
        got = source.view(file.name, 10, 33, memoryview(bytearray(4096)))
        assert got == (disk.checkpoints / AT_200.name / file.name).read_bytes()[10:43]
        with pytest.raises(CheckpointError, match=rf"{file.name}: ends at {file.bytes}, 5 bytes early"):
            source.view(file.name, file.bytes - 5, 10, memoryview(bytearray(4096)))


@pytest.mark.parametrize("kind", [FaultKind.SLOW_DOWN, FaultKind.BARE_503, FaultKind.ERROR_500, FaultKind.RESET])
def test_what_passes_is_tried_again(kind: FaultKind, disk: DiskPlace, open_store: Opener, proxy: FaultyProxy) -> None:
    """C069: a throttled request without code or message is sent again like any other."""
    store = open_store()
    proxy.faults += [Fault(kind, method="PUT", path="shard-00002", times=1), Fault(kind, method="GET", times=1)]
    send(disk, store, AT_200)
    assert is_whole(store)
    assert [fault.times for fault in proxy.faults] == [0, 0]


@pytest.mark.parametrize("kind", [FaultKind.CUT_UPLOAD, FaultKind.HANG])
def test_an_upload_that_breaks_off_or_hangs(
    kind: FaultKind, disk: DiskPlace, open_store: Opener, proxy: FaultyProxy
) -> None:
    store = open_store(silent_s=1.5)
    proxy.faults.append(Fault(kind, method="PUT", path="shard-00002", times=1))
    send(disk, store, AT_200)
    assert is_whole(store)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (FaultKind.SLOW_DOWN, "throttled (HTTP 503 SlowDown)"),
        (FaultKind.BARE_503, "throttled (HTTP 503)"),
        (FaultKind.ERROR_500, "the store has an error of its own (HTTP 500)"),
        (FaultKind.FORBIDDEN, "refused: check the credentials and what they allow (HTTP 403)"),
        (FaultKind.HANG, "the store cannot be reached (Read timeout on endpoint URL"),
    ],
)
def test_what_does_not_pass_is_said_and_nothing_looks_whole(
    kind: FaultKind, says: str, disk: DiskPlace, open_store: Opener, proxy: FaultyProxy
) -> None:
    """C069: told apart by the HTTP status. A partial upload is no checkpoint; the next try sends what is missing."""
    hasty = open_store(attempts=1, silent_s=1.5 if kind is FaultKind.HANG else 10.0)
    proxy.faults.append(Fault(kind, method="PUT", path="shard-00003"))
    with pytest.raises(StoreError) as error:
        send(disk, hasty, AT_200)
    assert says in str(error.value)
    assert "shard-00003" in str(error.value)
    store = open_store()
    assert store.candidates() == (AT_200,)
    with pytest.raises(CheckpointError, match="never committed: no manifest"):
        store.manifest(AT_200)
    proxy.faults.clear()
    proxy.seen.clear()
    send(disk, store, AT_200)
    assert is_whole(store)
    assert not puts(proxy, "shard-00001"), "what was there was sent again"


@pytest.mark.parametrize(
    ("response", "trouble"),
    [
        ({"Error": {"Code": "SlowDown", "Message": None}, "ResponseMetadata": {"HTTPStatusCode": 503}}, "THROTTLED"),
        ({"Error": {"Code": None, "Message": None}, "ResponseMetadata": {"HTTPStatusCode": 503}}, "THROTTLED"),
        ({"ResponseMetadata": {"HTTPStatusCode": 503}}, "THROTTLED"),
        ({"Error": {"Code": "429"}, "ResponseMetadata": {"HTTPStatusCode": 429}}, "THROTTLED"),
        ({"Error": {"Code": "SlowDown"}, "ResponseMetadata": {"HTTPStatusCode": 200}}, "THROTTLED"),
        ({"Error": {"Code": "InternalError"}, "ResponseMetadata": {"HTTPStatusCode": 500}}, "SERVER"),
        ({"Error": {}, "ResponseMetadata": {"HTTPStatusCode": 404}}, "MISSING"),
        ({"Error": {"Code": "AccessDenied"}, "ResponseMetadata": {"HTTPStatusCode": 403}}, "REFUSED"),
        ({}, "OTHER"),
    ],
)
def test_errors_are_told_apart_by_status(response: dict[str, object], trouble: str) -> None:
    """C069"""
    error = ClientError(response, "PutObject")  # type: ignore[arg-type]  # what a server really sent
    assert classify(error) is Trouble[trouble]
    assert str(store_error("s3://b/k", error)).startswith("s3://b/k: ")


def test_parts_that_arrived_are_not_sent_again(open_store: Opener, proxy: FaultyProxy, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, 200, world_size=1, rows=1_000_000)  # 24 MB
    disk, part_bytes = DiskPlace(tmp_path), 5 * 2**20
    shard = next(folder.glob("*.safetensors"))
    assert 4 * part_bytes < shard.stat().st_size < 5 * part_bytes
    store = open_store(attempts=1)
    proxy.faults.append(Fault(FaultKind.BARE_503, method="PUT", path="partNumber=[35](&|$)"))
    with pytest.raises(StoreError, match="throttled"):
        send(disk, store, AT_200, part_bytes=part_bytes)
    assert len(puts(proxy, "partNumber")) == 3
    assert not is_whole(store)
    proxy.faults.clear()
    sent = send(disk, store, AT_200, part_bytes=part_bytes)
    assert len(puts(proxy, "partNumber")) == 5
    assert sent.there_bytes == 3 * part_bytes
    assert is_whole(store)
    again = send(disk, store, AT_200, part_bytes=part_bytes)
    assert again.sent_bytes == 0
    assert len(puts(proxy, "partNumber")) == 5


def test_reading_goes_on_where_an_answer_broke_off(disk: DiskPlace, open_store: Opener, proxy: FaultyProxy) -> None:
    store = open_store()
    send(disk, store, AT_200)
    file = disk.manifest(AT_200).files[0]
    whole = (disk.checkpoints / AT_200.name / file.name).read_bytes()
    proxy.faults.append(Fault(FaultKind.CUT_ANSWER, method="GET", path=file.name, times=2))
    with store.source(AT_200) as source:
        assert source.view(file.name, 0, file.bytes, memoryview(bytearray(2**20))) == whole
        proxy.faults.append(Fault(FaultKind.CUT_ANSWER, method="GET", path=file.name))
        with pytest.raises(StoreError, match=f"{file.name}: the store cannot be reached"):
            source.view(file.name, 0, file.bytes, memoryview(bytearray(2**20)))


def test_what_is_rotten_on_disk_is_not_sent(disk: DiskPlace, open_store: Opener, proxy: FaultyProxy) -> None:
    harm(disk.checkpoints / AT_200.name, "flip")
    with pytest.raises(CheckpointError, match="shard-00002"):
        send(disk, open_store(), AT_200)
    assert puts(proxy) == []


def test_each_step_and_generation_has_a_prefix_of_its_own(disk: DiskPlace, open_store: Opener, tmp_path: Path) -> None:
    """C070: two saves share nothing. A late writer of an old generation changes nothing of the new one's."""
    store = open_store()
    write_checkpoint(tmp_path, 200, generation=1, world_size=2)
    send(disk, store, Candidate(200, 1))
    before = store.objects(Candidate(200, 1))
    send(disk, store, AT_200)
    assert sorted(store.candidates()) == [AT_200, Candidate(200, 1)]
    assert store.objects(Candidate(200, 1)) == before
    assert checked(store, Candidate(200, 1)).world_size == 2


def test_a_rewritten_checkpoint_of_the_same_name_replaces_the_old_one(
    disk: DiskPlace, open_store: Opener, tmp_path: Path
) -> None:
    """A run directory that was emptied and began anew: never a mixture of both."""
    store = open_store()
    send(disk, store, AT_200)
    disk.remove(AT_200)
    write_checkpoint(tmp_path, 200, world_size=2)
    send(disk, store, AT_200)
    assert checked(store, AT_200).world_size == 2
    assert len(store.objects(AT_200)) == 3


def test_what_is_wrong_in_the_store_is_said(disk: DiskPlace, open_store: Opener) -> None:
    """C050, C052: no manifest, a file that is missing, one of another length or content, and another run's."""
    store = open_store()
    send(disk, store, AT_200)
    name = disk.manifest(AT_200).files[1].name
    whole = store.get(AT_200, name)
    for content, says in ((whole[:-1], f"{name}: {len(whole) - 1} bytes, must be"), (whole[:-1] + b"x", name)):
        store.put(AT_200, name, content)
        with pytest.raises(CheckpointError, match=says):
            checked(store, AT_200)
    store._delete(AT_200, [name])
    with pytest.raises(CheckpointError, match=f"{name}: not there"):
        store.manifest(AT_200)
    send(disk, store, AT_200)
    with pytest.raises(CheckpointError, match=r"manifest\.json is of run r"):
        open_store(run="another").manifest(AT_200)
    assert open_store(run="r").manifest(AT_200)
    store._delete(AT_200, [MANIFEST])
    with pytest.raises(CheckpointError, match="never committed"):
        store.manifest(AT_200)


def test_removing_leaves_nothing_that_costs(disk: DiskPlace, open_store: Opener) -> None:
    store = open_store()
    send(disk, store, AT_200)
    key = store.address.key(AT_200.name, "shard-left")
    store.s3.create_multipart_upload(Bucket=store.address.bucket, Key=key)
    store.remove(AT_200)
    assert store.candidates() == ()
    left = store.s3.list_multipart_uploads(Bucket=store.address.bucket, Prefix=store.address.prefix)
    assert left.get("Uploads", []) == []


@pytest.mark.parametrize("text", ["s3://bucket", "s3://bucket/", "s3://B/x", "bucket/x", "s3://bucket//x"])
def test_an_address_that_is_none(text: str) -> None:
    with pytest.raises(ValueError, match="must be s3://bucket/prefix"):
        parse_address(text)


def test_an_address() -> None:
    assert str(parse_address("s3://my-bucket/runs/a/")) == "s3://my-bucket/runs/a"
