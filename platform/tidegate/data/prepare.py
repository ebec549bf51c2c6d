"""From a folder of captioned images to shuffled shards. One bad image never costs the others."""

from __future__ import annotations

import json
import random
import shutil
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from tidegate.checkpoint.files import sha256_of, sync_folder, sync_tree, write_synced
from tidegate.data.layout import INDEX, SCHEMA, BadRow, Index, ShardSeen, shard_name
from tidegate.errors import DataError

METADATA = "metadata.jsonl"


def prepare(images: Path, out: Path, *, seed: int, rows_per_shard: int) -> Index:
    """Read `images` (the imagefolder convention of `datasets`: `metadata.jsonl` with `file_name` and `text`), shuffle
    all rows by `seed`, and write shards and their index to `out`, which appears whole or not at all.

    Rows that can't be used are counted and listed in the index.

    Raises:
        DataError: no folder, no metadata, no usable row, or `out` is there already; each names the fix.
    """
    if rows_per_shard < 1:
        raise DataError(f"rows per shard must be at least 1, got {rows_per_shard}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out}: exists and is not empty\nhint: remove it, or write to another folder")
    rows, bad = _listed(images)
    good: list[tuple[str, str]] = []
    sizes: Counter[str] = Counter()
    for name, text in rows:
        size, why = _checked(images, name)
        if size is None:
            bad.append(BadRow(file_name=name, why=why))
        else:
            good.append((name, text))
            sizes[size] += 1
    if not good:
        first = f"; first: {bad[0].file_name}: {bad[0].why}" if bad else ""
        raise DataError(f"{images}: no usable image, {len(bad)} bad{first}\nhint: see {METADATA}'s `file_name` column")
    random.Random(seed).shuffle(good)
    return _written(
        images,
        out,
        good,
        Index(
            seed=seed, rows=len(good), shards=(), sizes=dict(sorted(sizes.items())), bad_rows=len(bad), bad=tuple(bad)
        ),
        rows_per_shard,
    )


def _listed(images: Path) -> tuple[list[tuple[str, str]], list[BadRow]]:
    if not images.is_dir():
        raise DataError(f"{images}: no such folder\nhint: give the folder that holds the images and {METADATA}")
    path = images / METADATA
    if not path.is_file():
        raise DataError(f'{path}: missing\nhint: one line per image: {{"file_name": "0001.png", "text": "a caption"}}')
    rows, bad = [], []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            name, text = row["file_name"], row["text"]
            if not isinstance(name, str) or not isinstance(text, str):
                raise TypeError("`file_name` and `text` must be strings")
        except (ValueError, KeyError, TypeError) as error:
            why = f"no {error}" if isinstance(error, KeyError) else str(error)
            bad.append(BadRow(file_name=f"{METADATA}:{number}", why=why))
            continue
        rows.append((name, text))
    if not rows and not bad:
        raise DataError(f'{path}: empty\nhint: one line per image: {{"file_name": "0001.png", "text": "a caption"}}')
    return rows, bad


def _checked(images: Path, name: str) -> tuple[str | None, str]:
    """(size as `WxH`, "") of an image that decodes to its end, else (None, why not)."""
    path = images / name
    if not path.resolve().is_relative_to(images.resolve()):
        return None, "lies outside the folder"
    try:
        with Image.open(path) as image:
            image.load()
            return f"{image.width}x{image.height}", ""
    # Pillow's decoders raise these for damaged files, a bomb being a huge size that the header claims.
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        strerror = error.strerror if isinstance(error, OSError) else None
        return None, strerror or str(error).replace(str(path), name) or type(error).__name__


def _written(images: Path, out: Path, good: list[tuple[str, str]], index: Index, rows_per_shard: int) -> Index:
    out.parent.mkdir(parents=True, exist_ok=True)
    staged = out.with_name(f".{out.name}.{uuid.uuid4().hex[:8]}")
    staged.mkdir()
    try:
        shards = tuple(_shards(images, staged, good, rows_per_shard))
        whole = index.model_copy(update={"shards": shards})
        sync_tree(staged)
        write_synced(staged / INDEX, whole.model_dump_json(indent=2).encode() + b"\n")
        staged.rename(out)
        sync_folder(out.parent)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return whole


def _shards(images: Path, staged: Path, good: list[tuple[str, str]], rows_per_shard: int) -> Iterator[ShardSeen]:
    starts = range(0, len(good), rows_per_shard)
    for number, start in enumerate(starts):
        rows = good[start : start + rows_per_shard]
        table = pa.Table.from_pydict(
            {
                "image": [{"bytes": (images / name).read_bytes(), "path": name} for name, _ in rows],
                "text": [text for _, text in rows],
            },
            schema=SCHEMA,
        )
        path = staged / shard_name(number, len(starts))
        # Images are compressed already.
        pq.write_table(table, path, compression="none", use_dictionary=["text"])
        yield ShardSeen(name=path.name, rows=len(rows), bytes=path.stat().st_size, sha256=sha256_of(path))


def as_text(index: Index) -> str:
    """What was done, for people."""
    sizes = ", ".join(f"{count} of {size}" for size, count in index.sizes.items())
    lines = [f"{index.rows} images ({sizes}) in {len(index.shards)} shards, {index.bad_rows} bad"]
    lines += [f"  bad: {row.file_name}: {row.why}" for row in index.bad[:10]]
    if index.bad_rows > 10:
        lines.append(f"  and {index.bad_rows - 10} more, listed in {INDEX}")
    return "\n".join(lines)
