"""A prepared data set on disk: Parquet shards as `datasets` and the hub lay them out, and an index.

    train-00000-of-00003.parquet   columns `image` (struct of bytes and path) and `text`, rows in global random order
    index.json                     counts, sizes, hashes, seed, and what could not be used

A folder without its index is no data set.
"""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path
from typing import Literal

import pyarrow as pa
from PIL import Image
from pydantic import ValidationError

from tidegate.errors import DataError
from tidegate.spec.policy import Model

INDEX = "index.json"

# What `datasets` writes too: with it `load_dataset("parquet", ...)` gives back decoded images.
_FEATURES = {"image": {"_type": "Image"}, "text": {"dtype": "string", "_type": "Value"}}
SCHEMA = pa.schema(
    [
        pa.field("image", pa.struct([pa.field("bytes", pa.binary()), pa.field("path", pa.string())])),
        pa.field("text", pa.string()),
    ],
    metadata={"huggingface": json.dumps({"info": {"features": _FEATURES}})},
)


class ShardSeen(Model):
    name: str
    rows: int
    bytes: int
    sha256: str


class BadRow(Model):
    """A row of the source that is in no shard."""

    file_name: str
    why: str


class Index(Model):
    format: Literal[1] = 1
    seed: int
    rows: int
    shards: tuple[ShardSeen, ...]
    sizes: dict[str, int]
    """How many images there are of each `WxH`."""
    bad_rows: int
    bad: tuple[BadRow, ...]


def shard_name(number: int, count: int) -> str:
    return f"train-{number:05d}-of-{count:05d}.parquet"


def read_index(folder: Path) -> Index:
    """The index of a prepared data set, its shards being there with the right sizes.

    Raises:
        DataError: there is none, it can't be read, or a shard is missing or cut.
    """
    path = folder / INDEX
    try:
        index = Index.model_validate_json(path.read_bytes())
    except OSError as error:
        hint = "prepare it: jobs/prepare_data.py --images DIR --out DIR"
        raise DataError(f"{path}: {error.strerror}\nhint: {hint}") from None
    except ValidationError as error:
        raise DataError(f"{path}: not an index: {error.errors()[0]['msg']}\nhint: prepare the data again") from None
    for shard in index.shards:
        file = folder / shard.name
        size = file.stat().st_size if file.exists() else None
        if size != shard.bytes:
            seen = "missing" if size is None else f"{size} bytes"
            raise DataError(f"{file}: {seen}, must be {shard.bytes} bytes\nhint: prepare the data again")
    return index


def fingerprint(index: Index) -> str:
    """A short hash of what the samples are and in which order they lie."""
    return hashlib.sha256(index.model_dump_json().encode()).hexdigest()[:16]


def decode(raw: bytes, channels: int) -> Image.Image:
    """An image with `channels` channels: 1 grey, 2 grey and alpha, 3 RGB, 4 RGBA."""
    return Image.open(io.BytesIO(raw)).convert(("L", "LA", "RGB", "RGBA")[channels - 1])
