"""A prepared data set: Parquet shards as `datasets` and the hub lay them out, and an index. On disk or in S3.

    train-00000-of-00003.parquet   columns `image` (struct of bytes and path), `text`, `text_short`; one size a shard
    rejected.jsonl                 a line for each sample of the source that is in no shard, and why
    index.json                     counts, sizes, hashes, seed; written last

A folder without its index is no data set.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Literal

import pyarrow as pa
from pydantic import ValidationError

from tidegate.data.buckets import Size
from tidegate.data.storage import Folder
from tidegate.errors import DataError
from tidegate.spec.policy import Model

INDEX = "index.json"
REJECTED = "rejected.jsonl"

# What `datasets` writes too: with it `load_dataset("parquet", ...)` gives back decoded images.
_STRING = {"dtype": "string", "_type": "Value"}
_FEATURES = {"image": {"_type": "Image"}, "text": _STRING, "text_short": _STRING}
SCHEMA = pa.schema(
    [
        pa.field("image", pa.struct([pa.field("bytes", pa.binary()), pa.field("path", pa.string())])),
        pa.field("text", pa.string()),
        pa.field("text_short", pa.string()),
    ],
    metadata={"huggingface": json.dumps({"info": {"features": _FEATURES}})},
)


class ShardSeen(Model):
    name: str
    rows: int
    bytes: int
    sha256: str
    width: int
    height: int
    """Of all its images."""

    @property
    def size(self) -> Size:
        return Size(self.width, self.height)


class Rejected(Model):
    """A sample of the source that is in no shard."""

    source: str
    """Where it came from: a path inside the source, with what leads to the sample in it."""
    why: str


class Index(Model):
    format: Literal[2] = 2
    seed: int
    rows: int
    block_rows: int
    """Rows among which an epoch's order is drawn; see `tidegate.data.order`."""
    shards: tuple[ShardSeen, ...]
    """In the order of their samples' ids. Those of one size follow each other: they are a bucket."""
    rejected_rows: int
    rejected_first: tuple[Rejected, ...]
    """Some of them; `rejected.jsonl` has all."""

    @property
    def buckets(self) -> Mapping[Size, int]:
        """Rows of each size, in the order of their ids."""
        rows: dict[Size, int] = {}
        for shard in self.shards:
            rows[shard.size] = rows.get(shard.size, 0) + shard.rows
        return rows


def shard_name(number: int, count: int) -> str:
    return f"train-{number:05d}-of-{count:05d}.parquet"


def read_index(folder: Folder) -> Index:
    """The index of a prepared data set, its shards being there with the right sizes.

    Raises:
        DataError: there is none, it can't be read, or a shard is missing or cut.
    """
    path = f"{folder}/{INDEX}"
    try:
        index = Index.model_validate_json(folder.read(INDEX))
    except FileNotFoundError:
        hint = "prepare it: jobs/prepare_data.py --images DIR --out DIR"
        raise DataError(f"{path}: No such file or directory\nhint: {hint}") from None
    except OSError as error:
        raise DataError(f"{path}: {error}\nhint: is the folder readable from this machine?") from None
    except ValidationError as error:
        raise DataError(f"{path}: not an index: {error.errors()[0]['msg']}\nhint: prepare the data again") from None
    there = folder.files()
    for shard in index.shards:
        size = there.get(shard.name)
        if size != shard.bytes:
            seen = "missing" if size is None else f"{size} bytes"
            raise DataError(f"{folder}/{shard.name}: {seen}, must be {shard.bytes} bytes\nhint: prepare the data again")
    return index


def fingerprint(index: Index) -> str:
    """A short hash of what the samples are and in which order they lie."""
    return hashlib.sha256(index.model_dump_json().encode()).hexdigest()[:16]


def lines(rejected: Iterable[Rejected]) -> bytes:
    """The text of `rejected.jsonl`."""
    return "".join(one.model_dump_json() + "\n" for one in rejected).encode()


def as_text(index: Index) -> str:
    """What is in a data set, for people."""
    sizes = ", ".join(f"{rows} of {size}" for size, rows in index.buckets.items())
    found = [f"{index.rows} images ({sizes}) in {len(index.shards)} shards, {index.rejected_rows} rejected"]
    found += [f"  rejected: {row.source}: {row.why}" for row in index.rejected_first]
    if index.rejected_rows > len(index.rejected_first):
        found.append(f"  and {index.rejected_rows - len(index.rejected_first)} more, listed in {REJECTED}")
    return "\n".join(found)
