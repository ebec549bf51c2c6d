"""Checkpoints in an object store that speaks S3's protocol, as a tier that a restore reads from.

    s3://bucket/runs/digits/
      step-00000200.g3/                 one prefix for each step and generation: no two writers share one
        shard-00001-model-…safetensors
        …
        manifest.json                   put last: without it nothing here is a checkpoint
        pinned, bad                     marks, see `marks.py`

Ranks read the ranges that they need straight into memory. Credentials are found by boto3's own chain; retries are
botocore's (exponential, with jitter).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError, IncompleteReadError

from tidegate.checkpoint.address import Address
from tidegate.checkpoint.manifest import MANIFEST, Manifest, parse_manifest, parse_name
from tidegate.checkpoint.marks import Mark, as_sentence
from tidegate.checkpoint.store_errors import StoreError, Trouble, store_error
from tidegate.checkpoint.tiers import Candidate, check_owner
from tidegate.errors import CheckpointError, UnfinishedError

STREAMS = 16
"""Requests at once that make reading fastest: S3 gives one of them 60 to 90 MB/s."""

_READS = 4
"""A range whose answer breaks off is asked for so often: botocore retries requests, not the reading of bodies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a request is tried."""

    attempts: int = 6
    connect_s: float = 10.0
    silent_s: float = 60.0
    """A connection on which nothing comes for so long is given up."""


def client(endpoint: str | None, patience: Patience) -> Any:
    """boto3's client of the store; safe for threads.

    Raises:
        StoreError: no region or profile that boto3 could use, or `endpoint` is no address.
    """
    # Takes a third of a second, in which a rank that restores from nearer tiers would wait for nothing.
    import boto3
    from botocore.config import Config

    config = Config(
        retries={"mode": "standard", "total_max_attempts": patience.attempts},
        connect_timeout=patience.connect_s,
        read_timeout=patience.silent_s,
        max_pool_connections=STREAMS + 4,
        tcp_keepalive=True,
    )
    try:
        return boto3.session.Session().client("s3", endpoint_url=endpoint, config=config)
    except BotoCoreError as error:
        raise store_error(endpoint or "s3", error) from None
    except ValueError as error:
        raise StoreError(endpoint or "s3", Trouble.OTHER, str(error)) from None


@contextmanager
def saying(what: str) -> Iterator[None]:
    """Turns botocore's errors into ours."""
    try:
        yield
    except (BotoCoreError, ClientError) as error:
        raise store_error(what, error) from None


@dataclass(frozen=True, slots=True)
class Stored:
    """An object as a listing shows it."""

    bytes: int
    etag: str


class ObjectStore:
    """All checkpoints of a run below one address."""

    label = "s3"
    far = True

    def __init__(
        self,
        address: Address,
        endpoint: str | None = None,
        *,
        run: str | None = None,
        patience: Patience | None = None,
    ) -> None:
        """`run`: where given, checkpoints of another run are none."""
        self.address, self._endpoint, self._run = address, endpoint, run
        self._patience = patience or Patience()

    @cached_property
    def s3(self) -> Any:
        """boto3's client, made when something is first asked of the store."""
        return client(self._endpoint, self._patience)

    def candidates(self) -> Sequence[Candidate]:
        with saying(str(self.address)):
            pages = self.s3.get_paginator("list_objects_v2").paginate(
                Bucket=self.address.bucket, Prefix=self.address.key(""), Delimiter="/"
            )
            names = [
                str(item["Prefix"]).rstrip("/").rpartition("/")[2]
                for page in pages
                for item in page.get("CommonPrefixes", ())
            ]
        return tuple(Candidate(*parsed) for parsed in map(parse_name, names) if parsed is not None)

    def manifest(self, candidate: Candidate) -> Manifest:
        there = self.objects(candidate)
        if MANIFEST not in there:
            raise UnfinishedError("never committed: no manifest")
        manifest = parse_manifest(self.get(candidate, MANIFEST))
        check_owner(manifest, candidate)
        if self._run is not None and manifest.run != self._run:
            raise CheckpointError(f"{MANIFEST} is of run {manifest.run}")
        if Mark.BAD in there:
            raise CheckpointError(f"marked bad: {as_sentence(self.get(candidate, Mark.BAD))}")
        problem = missing(manifest, there)
        if problem is not None:
            raise CheckpointError(problem)
        return manifest

    def source(self, candidate: Candidate) -> ObjectSource:
        return ObjectSource(self, self.s3, candidate)

    def objects(self, candidate: Candidate) -> Mapping[str, Stored]:
        """What lies below the checkpoint's prefix, by name."""
        prefix = self.address.key(candidate.name, "")
        with saying(self.shown(candidate)):
            pages = self.s3.get_paginator("list_objects_v2").paginate(Bucket=self.address.bucket, Prefix=prefix)
            return {
                str(item["Key"]).removeprefix(prefix): Stored(int(item["Size"]), str(item["ETag"]).strip('"'))
                for page in pages
                for item in page.get("Contents", ())
            }

    def get(self, candidate: Candidate, name: str) -> bytes:
        """A small object's content."""
        with saying(self.shown(candidate, name)):
            answer = self.s3.get_object(Bucket=self.address.bucket, Key=self.address.key(candidate.name, name))
            return bytes(answer["Body"].read())

    def put(self, candidate: Candidate, name: str, content: bytes) -> None:
        """A small object, whole or not at all."""
        with saying(self.shown(candidate, name)):
            self.s3.put_object(Bucket=self.address.bucket, Key=self.address.key(candidate.name, name), Body=content)

    def probe(self) -> None:
        """Write something, and take it away again."""
        key = self.address.key(".probe")
        with saying(str(self.address)):
            self.s3.put_object(Bucket=self.address.bucket, Key=key, Body=b"")
            self.s3.delete_object(Bucket=self.address.bucket, Key=key)

    def shown(self, candidate: Candidate, *names: str) -> str:
        return "/".join((str(self.address), candidate.name, *names))

    # What people and retention ask for

    def marks(self, candidate: Candidate) -> Mapping[Mark, str]:
        there = self.objects(candidate)
        return {mark: as_sentence(self.get(candidate, mark)) for mark in Mark if mark in there}

    def mark(self, candidate: Candidate, mark: Mark, why: str) -> None:
        self.put(candidate, mark, why.encode() + b"\n")

    def unmark(self, candidate: Candidate, mark: Mark) -> None:
        self._delete(candidate, [mark])

    def remove(self, candidate: Candidate) -> None:
        self._delete(candidate, [MANIFEST])
        self._delete(candidate, sorted(self.objects(candidate)))
        # Parts of uploads that never ended are in no listing of objects, and cost as much.
        prefix = self.address.key(candidate.name, "")
        with saying(self.shown(candidate)):
            for page in self.s3.get_paginator("list_multipart_uploads").paginate(
                Bucket=self.address.bucket, Prefix=prefix
            ):
                for upload in page.get("Uploads", ()):
                    self.s3.abort_multipart_upload(
                        Bucket=self.address.bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                    )

    def _delete(self, candidate: Candidate, names: Sequence[str]) -> None:
        with saying(self.shown(candidate)):
            for first in range(0, len(names), 1000):  # S3's limit for one request
                keys = [{"Key": self.address.key(candidate.name, name)} for name in names[first : first + 1000]]
                answer = self.s3.delete_objects(Bucket=self.address.bucket, Delete={"Objects": keys, "Quiet": True})
                for failed in answer.get("Errors", ()):
                    raise StoreError(f"s3://{self.address.bucket}/{failed['Key']}", Trouble.OTHER, failed["Code"])


_HINTS: Mapping[Trouble, str] = {
    Trouble.THROTTLED: "submit again when it has less to do",
    Trouble.SERVER: "submit again when it is well",
    Trouble.NETWORK: "correct the address, or the network's rules",
    Trouble.MISSING: "create the bucket, or correct the address",
    Trouble.REFUSED: "the credentials that boto3 finds must allow what docs/object-store.md lists",
    Trouble.NO_CREDENTIALS: "`aws sts get-caller-identity` on rank 0's node shows what boto3 finds",
    Trouble.OTHER: "is it the right endpoint, and the right region?",
}


def check(store: ObjectStore, run: str) -> None:
    """Whether `run` could keep its checkpoints there: the place can be listed and written to, and is nobody else's.

    Raises:
        CheckpointError: it could not; says which setting is wrong.
    """
    try:
        found = sorted(store.candidates(), reverse=True)
        store.probe()
    except StoreError as error:
        field = "checkpoint.store_endpoint" if error.trouble is Trouble.NETWORK else "checkpoint.store"
        raise CheckpointError(f"{field}: {error}\nhint: {_HINTS[error.trouble]}") from None
    for candidate in found:
        try:
            owner = parse_manifest(store.get(candidate, MANIFEST)).run
        except CheckpointError:
            continue
        if owner != run:
            whose = f"checkpoint.store: {store.address} holds checkpoints of run {owner}"
            raise CheckpointError(f"{whose}\nhint: give each run a prefix of its own")
        return


def missing(manifest: Manifest, there: Mapping[str, Stored]) -> str | None:
    """The first file of a manifest that isn't among the objects with its size; None where all are."""
    for file in manifest.files:
        found = there.get(file.name)
        if found is None:
            return f"{file.name}: not there"
        if found.bytes != file.bytes:
            return f"{file.name}: {found.bytes} bytes, must be {file.bytes}"
    return None


@dataclass(frozen=True, slots=True)
class ObjectSource:
    """Ranges of a checkpoint's objects."""

    store: ObjectStore
    s3: Any
    candidate: Candidate
    streams: int = STREAMS
    chunk_bytes: int = 8 << 20
    fills_any: bool = True
    """A request costs a round trip whatever its size."""

    def view(self, file: str, offset: int, count: int, scratch: memoryview) -> memoryview:
        if not count:
            return scratch[:0]
        broke: BotoCoreError | None = None
        for _ in range(_READS):
            try:
                return self._read(file, offset, scratch[:count])
            except (HTTPClientError, IncompleteReadError) as error:
                broke = error
        assert broke is not None
        raise store_error(self.store.shown(self.candidate, file), broke)

    def _read(self, file: str, offset: int, out: memoryview) -> memoryview:
        address, end = self.store.address, offset + len(out)
        with saying(self.store.shown(self.candidate, file)):
            answer = self.s3.get_object(
                Bucket=address.bucket,
                Key=address.key(self.candidate.name, file),
                Range=f"bytes={offset}-{end - 1}",
            )
        left = out
        while left:
            got = answer["Body"].readinto(left)
            if not got:
                raise CheckpointError(f"{file}: ends at {end - len(left)}, {len(left)} bytes early")
            left = left[got:]
        return out

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        """Connections are the client's."""
