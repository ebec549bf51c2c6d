"""From a folder of captioned images to shuffled shards, in this process: for sets that fit. `jobs/prepare_data.py` does
it at any size. One bad image never costs the others."""

from __future__ import annotations

import random
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from tidegate.checkpoint.files import sync_folder, sync_tree, write_synced
from tidegate.data.buckets import Limits, Size, block_rows, bucket, cut
from tidegate.data.layout import INDEX, REJECTED, SCHEMA, Index, Rejected, ShardSeen, lines, shard_name
from tidegate.data.listing import Listed, listed
from tidegate.data.pictures import DAMAGED, opened, size_of, why_damaged
from tidegate.data.shards import parquet, seen
from tidegate.data.storage import Folder
from tidegate.errors import DataError

SHOWN = 10
"""So many rejected samples stand in the index itself."""


def prepare(images: Path, out: Path, *, seed: int, rows_per_shard: int) -> Index:
    """Read `images` (see `tidegate.data.listing`), shuffle all rows by `seed`, and write shards and their index to
    `out`, which appears whole or not at all. Images keep their bytes and their sizes.

    Rows that can't be used are counted and listed.

    Raises:
        DataError: no folder, no captions, no usable row, or `out` is there already; each names the fix.
    """
    check_rows(rows_per_shard)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out}: exists and is not empty\nhint: remove it, or write to another folder")
    source = Folder.at(images)
    rows, rejected = listed(source)
    good: list[tuple[Size, Listed]] = []
    bytes_seen = 0
    for row in rows:
        try:
            raw = source.read(row.name)
            text, short = row.captions(source)
            size, why = bucket(size_of(opened(raw)), text, Limits())
        except DAMAGED as error:
            size, why = None, why_damaged(error)
        if size is None:
            rejected.append(Rejected(source=row.name, why=why))
        else:
            good.append((size, Listed(row.name, text, short)))
            bytes_seen += len(raw) + len(text)
    if not good:
        raise nothing_usable(str(images), rejected)
    random.Random(seed).shuffle(good)
    block = block_rows(bytes_seen / len(good))
    out.parent.mkdir(parents=True, exist_ok=True)
    staged = out.with_name(f".{out.name}.{uuid.uuid4().hex[:8]}")
    staged.mkdir()
    try:
        shards = tuple(_shards(source, staged, good, rows_per_shard, block))
        index = Index(
            seed=seed,
            rows=len(good),
            block_rows=block,
            shards=shards,
            rejected_rows=len(rejected),
            rejected_first=tuple(rejected[:SHOWN]),
        )
        (staged / REJECTED).write_bytes(lines(rejected))
        sync_tree(staged)
        write_synced(staged / INDEX, index.model_dump_json(indent=2).encode() + b"\n")
        staged.rename(out)
        sync_folder(out.parent)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return index


def check_rows(rows_per_shard: int) -> None:
    if rows_per_shard < 1:
        raise DataError(f"rows per shard must be at least 1, got {rows_per_shard}\nhint: e.g. 8192")


def nothing_usable(images: str, rejected: list[Rejected]) -> DataError:
    first = f"; first: {rejected[0].source}: {rejected[0].why}" if rejected else ""
    return DataError(f"{images}: no usable image, {len(rejected)} rejected{first}\nhint: mend these, or other limits")


def _shards(
    source: Folder, staged: Path, good: list[tuple[Size, Listed]], rows_per_shard: int, block: int
) -> Iterator[ShardSeen]:
    of_size = {size: [row for one, row in good if one == size] for size in sorted({size for size, _ in good})}
    cuts = [(size, part) for size, rows in of_size.items() for part in cut(len(rows), rows_per_shard)]
    for number, (size, part) in enumerate(cuts):
        rows = of_size[size][part.start : part.stop]
        data = parquet(_table(source, rows), block)
        name = shard_name(number, len(cuts))
        (staged / name).write_bytes(data)
        yield seen(name, data, len(rows), size)


def _table(source: Folder, rows: list[Listed]) -> Any:
    return pa.Table.from_pydict(
        {
            "image": [{"bytes": source.read(row.name), "path": row.name} for row in rows],
            "text": [row.text for row in rows],
            "text_short": [row.short or None for row in rows],
        },
        schema=SCHEMA,
    )
