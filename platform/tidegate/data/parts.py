"""The first half of a preparation: samples decoded, filtered, cut to their bucket, and kept as parts.

A part is some hundred samples of one split, an Arrow file that holds a shard's columns and three more: the sample's
place in the global shuffle (`key`) and its size. Parts that exist are not made again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa

from tidegate.data.buckets import Limits, Size, bucket
from tidegate.data.layout import SCHEMA, Rejected
from tidegate.data.pictures import DAMAGED, fitted, opened, size_of, why_damaged
from tidegate.data.sources import Sample
from tidegate.data.storage import Folder

KEYS = ("key", "width", "height")
_KEY_FIELDS = [pa.field("key", pa.uint64()), pa.field("width", pa.int32()), pa.field("height", pa.int32())]
_BATCH_ROWS = 32
"""Rows of a record batch: what is read at least, where a shard needs a few rows of a part."""
_REJECTED = b"rejected"


@dataclass(frozen=True, slots=True)
class Kept:
    """A sample that goes into a shard."""

    size: Size
    source: str
    raw: bytes
    """Encoded, at `size`."""
    text: str
    short: str


def part_name(split: int, part: int, *, last: bool) -> str:
    return f"{split:06d}-{part:04d}{'.last' if last else ''}.arrow"


def whole_splits(parts: Iterable[str]) -> set[int]:
    """The splits of which all parts are among `parts`."""
    there: dict[int, set[int]] = {}
    counts: dict[int, int] = {}
    for name in parts:
        split, part = (int(number) for number in name.partition(".")[0].split("-"))
        there.setdefault(split, set()).add(part)
        if ".last." in name:
            counts[split] = part + 1
    return {split for split, count in counts.items() if there[split] == set(range(count))}


def kept(sample: Sample, limits: Limits) -> Kept | Rejected:
    """One bad image is listed, and costs nobody else."""
    try:
        image = opened(sample.raw)
        size, why = bucket(size_of(image), sample.text, limits)
        if size is not None:
            return Kept(size, sample.source, fitted(sample.raw, image, size), sample.text, sample.short)
    except DAMAGED as error:
        why = why_damaged(error)
    return Rejected(source=sample.source, why=why)


def chunks(samples: Iterator[Sample | Rejected], rows: int) -> Iterator[tuple[list[Sample | Rejected], bool]]:
    """Lists of `rows` samples, and whether each is the last; at least one."""
    chunk = list(islice(samples, rows))
    while True:
        following = list(islice(samples, rows))
        yield chunk, not following
        if not following:
            return
        chunk = following


def table(samples: Iterable[Sample | Rejected], limits: Limits, seed: int) -> Any:
    """A part: rows sorted by size and key, the rejected in its metadata."""
    looked_at = [sample if isinstance(sample, Rejected) else kept(sample, limits) for sample in samples]
    rows = sorted(
        ((row.size, key(seed, row.source), row) for row in looked_at if isinstance(row, Kept)),
        key=lambda row: row[:2],
    )
    rejected = [row.model_dump() for row in looked_at if isinstance(row, Rejected)]
    columns = {
        "key": [key for _, key, _ in rows],
        "width": [size.width for size, _, _ in rows],
        "height": [size.height for size, _, _ in rows],
        "image": [{"bytes": row.raw, "path": row.source} for _, _, row in rows],
        "text": [row.text for _, _, row in rows],
        "text_short": [row.short or None for _, _, row in rows],
    }
    schema = pa.schema([*_KEY_FIELDS, *SCHEMA], metadata={_REJECTED: json.dumps(rejected)})
    return pa.Table.from_pydict(columns, schema=schema)


def key(seed: int, source: str) -> int:
    """A sample's place in the global shuffle: by its name alone, so that no process must know the others."""
    return int.from_bytes(hashlib.blake2b(f"{seed}\0{source}".encode(), digest_size=8).digest(), "big")


def to_bytes(part: Any) -> bytes:
    out = pa.BufferOutputStream()
    with pa.ipc.new_file(out, part.schema) as file:
        file.write_table(part, max_chunksize=_BATCH_ROWS)
    data: bytes = out.getvalue().to_pybytes()
    return data


def from_bytes(data: bytes) -> Any:
    return pa.ipc.open_file(pa.BufferReader(data)).read_all()


def read_keys(folder: Folder, name: str) -> tuple[Any, list[Rejected]]:
    """The three columns of a part that say where its rows go, (rows, 3) as a structured array, and its rejected."""
    options = pa.ipc.IpcReadOptions(included_fields=[0, 1, 2])
    with folder.open(name) as file:
        reader = pa.ipc.open_file(file, options=options)
        rejected = [Rejected.model_validate(row) for row in json.loads(reader.schema.metadata[_REJECTED])]
        columns = reader.read_all()
    found = np.empty(columns.num_rows, dtype=[("key", np.uint64), ("width", np.int32), ("height", np.int32)])
    for column in KEYS:
        found[column] = columns[column].to_numpy()
    return found, rejected


def take(folder: Folder, name: str, rows: Any) -> Any:
    """Some rows of a part, without `KEYS`; what lies between is not read."""
    with folder.open(name) as file:
        reader = pa.ipc.open_file(file)
        batches = np.asarray(rows) // _BATCH_ROWS
        taken = [
            reader.get_batch(int(number)).take(pa.array(rows[batches == number] % _BATCH_ROWS))
            for number in np.unique(batches)
        ]
    return pa.Table.from_batches(taken).drop_columns(list(KEYS)).replace_schema_metadata(None)
