"""Send one committed checkpoint from its folder to the object store: what is there already is not sent again.

Large files go in parts. boto3's transfer manager would abort an upload that fails, and so throw away the parts that had
arrived; here they stay, and the next try sends the rest. What a part or a whole object holds is known by its ETag, the
MD5 of its content (of its parts' MD5s). Where the store encrypts with keys of its own the ETag is something else, and
then all is sent anew: slower, never wrong.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from s3transfer.utils import ReadFileChunk

from tidegate.checkpoint.manifest import MANIFEST, Manifest
from tidegate.checkpoint.object_store import ObjectStore, Stored, missing, saying
from tidegate.checkpoint.places import DiskPlace
from tidegate.checkpoint.scrub import checked
from tidegate.checkpoint.tiers import Candidate
from tidegate.errors import CheckpointError

PART_BYTES = 64 * 2**20
STREAMS = 4
"""Parts on their way at once: more would take the network from training."""
_PARTS_MAX = 10_000
"""S3's limit for one object."""


@dataclass(frozen=True, slots=True)
class Sent:
    """What an upload cost."""

    sent_bytes: int
    there_bytes: int
    """What was in the store already."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a file. Parts count from 1."""

    number: int
    begin: int
    size_bytes: int
    md5: bytes


def send(disk: DiskPlace, store: ObjectStore, candidate: Candidate, *, part_bytes: int = PART_BYTES) -> Sent:
    """Bring a checkpoint into the store. Returns when its manifest is there.

    Raises:
        StoreError: the store does not take it. What has arrived is used by the next try.
        CheckpointError: it is not whole on disk; nothing was sent.
    """
    manifest = checked(disk, candidate)
    folder = disk.checkpoints / candidate.name
    there = store.objects(candidate)
    if MANIFEST in there and store.get(candidate, MANIFEST) != (folder / MANIFEST).read_bytes():
        # Something of the same name, from another life of this run directory: it is no checkpoint while we change it.
        store.remove(candidate)
        there = {}
    sent = 0
    with ThreadPoolExecutor(STREAMS, thread_name_prefix="send") as threads:
        for file in manifest.files:
            sent += _File(store, candidate, folder / file.name, part_bytes).send(there.get(file.name), threads)
    _commit(store, candidate, manifest, (folder / MANIFEST).read_bytes())
    return Sent(sent, manifest.total_bytes - sent)


def _commit(store: ObjectStore, candidate: Candidate, manifest: Manifest, content: bytes) -> None:
    problem = missing(manifest, store.objects(candidate))
    if problem is not None:
        raise CheckpointError(f"{store.shown(candidate)}: somebody else changed it while it was sent: {problem}")
    store.put(candidate, MANIFEST, content)


class _File:
    """One file on its way to its object."""

    def __init__(self, store: ObjectStore, candidate: Candidate, path: Path, part_bytes: int) -> None:
        self._s3, self._path = store.s3, path
        self._object = {"Bucket": store.address.bucket, "Key": store.address.key(candidate.name, path.name)}
        self._what = store.shown(candidate, path.name)
        self._bytes = path.stat().st_size
        self._part_bytes = max(part_bytes, -(-self._bytes // _PARTS_MAX))

    def send(self, there: Stored | None, threads: ThreadPoolExecutor) -> int:
        """Bytes that had to be sent."""
        pieces = list(self._pieces())
        if there is not None and there == Stored(self._bytes, _etag(pieces)):
            return 0
        with saying(self._what):
            return self._send_whole() if len(pieces) == 1 else self._send_parts(pieces, threads)

    def _send_whole(self) -> int:
        with ReadFileChunk.from_filename(str(self._path), 0, self._bytes) as content:
            self._s3.put_object(**self._object, Body=content)
        return self._bytes

    def _send_parts(self, pieces: Sequence[_Piece], threads: ThreadPoolExecutor) -> int:
        upload, arrived = self._unfinished() or (self._s3.create_multipart_upload(**self._object)["UploadId"], {})
        wanted = [piece for piece in pieces if arrived.get(piece.number) != Stored(piece.size_bytes, piece.md5.hex())]
        etags = {number: part.etag for number, part in arrived.items()}
        # All are waited for before an error is raised: none may still arrive when the caller tries again.
        results = [(piece, threads.submit(self._send_part, upload, piece)) for piece in wanted]
        for piece, result in results:
            if result.exception() is None:
                etags[piece.number] = result.result()
        for _, result in results:
            result.result()
        parts = [{"PartNumber": piece.number, "ETag": etags[piece.number]} for piece in pieces]
        self._s3.complete_multipart_upload(**self._object, UploadId=upload, MultipartUpload={"Parts": parts})
        return sum(piece.size_bytes for piece in wanted)

    def _send_part(self, upload: str, piece: _Piece) -> str:
        with ReadFileChunk.from_filename(str(self._path), piece.begin, piece.size_bytes) as content:
            answer = self._s3.upload_part(**self._object, UploadId=upload, PartNumber=piece.number, Body=content)
        return str(answer["ETag"]).strip('"')

    def _unfinished(self) -> tuple[str, Mapping[int, Stored]] | None:
        """The upload of this object that somebody began and did not end, with its parts; the newest if several."""
        pages = self._s3.get_paginator("list_multipart_uploads").paginate(
            Bucket=self._object["Bucket"], Prefix=self._object["Key"]
        )
        uploads = [
            upload for page in pages for upload in page.get("Uploads", ()) if upload["Key"] == self._object["Key"]
        ]
        if not uploads:
            return None
        newest = max(uploads, key=lambda upload: upload["Initiated"])["UploadId"]
        parts: list[dict[str, Any]] = [
            part
            for page in self._s3.get_paginator("list_parts").paginate(**self._object, UploadId=newest)
            for part in page.get("Parts", ())
        ]
        return newest, {part["PartNumber"]: Stored(part["Size"], str(part["ETag"]).strip('"')) for part in parts}

    def _pieces(self) -> Iterator[_Piece]:
        if not self._bytes:
            yield _Piece(1, 0, 0, _md5(b""))
            return
        with self._path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            for number, begin in enumerate(range(0, self._bytes, self._part_bytes), start=1):
                with memoryview(content)[begin : begin + self._part_bytes] as piece:
                    yield _Piece(number, begin, len(piece), _md5(piece))


def _etag(pieces: Sequence[_Piece]) -> str:
    """As S3 makes it."""
    if len(pieces) == 1:
        return pieces[0].md5.hex()
    together = _md5(b"".join(piece.md5 for piece in pieces))
    return f"{together.hex()}-{len(pieces)}"


def _md5(content: bytes | memoryview) -> bytes:
    return hashlib.md5(content, usedforsecurity=False).digest()
