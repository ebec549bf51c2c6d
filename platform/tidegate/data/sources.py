"""Captioned images as they come: a folder, Parquet files, WebDataset tars. Cut into splits that are read one by one.

    folder     metadata.jsonl, or a text file beside each image (see `tidegate.data.listing`)
    *.parquet  columns `image` (bytes, or a struct of bytes and path), `text` and, if there, `text_short`
    *.tar      0001.jpg, 0001.txt and, if there, 0001.short.txt; or 0001.json with `text` and `text_short`

A sample is known by its `source`, which says where it lies whatever else lies there.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tidegate.data.layout import Rejected
from tidegate.data.listing import IMAGES, LONG, SHORT, Listed, listed
from tidegate.data.pictures import why_damaged
from tidegate.data.storage import Folder
from tidegate.errors import DataError

_ROWS_AT_A_TIME = 32
GONE = (FileNotFoundError, PermissionError, IsADirectoryError)
"""One file is the matter; any other error of reading is the store's, and stops the job, which can go on later."""


@dataclass(frozen=True, slots=True)
class Sample:
    source: str
    raw: bytes
    """The image's file."""
    text: str
    short: str = ""


@dataclass(frozen=True, slots=True)
class Split:
    """So much of a source as one task reads."""

    name: str
    """The file; empty for a part of a folder."""
    rows: tuple[Listed, ...] = ()
    rejected: tuple[Rejected, ...] = ()
    """Known to be of no use without a look."""


def splits(source: Folder, rows_per_split: int) -> list[Split]:
    """All of a source, always in the same order.

    Raises:
        DataError: there is nothing in it.
    """
    files = [name for name in source.files() if name.lower().endswith((".parquet", ".tar", ".tar.gz", ".tgz"))]
    if files:
        return [Split(name) for name in files]
    rows, rejected = listed(source)
    parts = [rows[start : start + rows_per_split] for start in range(0, len(rows), rows_per_split)] or [[]]
    return [Split("", tuple(part), tuple(rejected) if part is parts[0] else ()) for part in parts]


def read(source: Folder, split: Split) -> Iterator[Sample | Rejected]:
    """Its samples in their order.

    Raises:
        DataError: a Parquet file has other columns.
        OSError: the store fails.
    """
    if not split.name:
        yield from split.rejected
        for row in split.rows:
            yield of_folder(source, row)
    elif split.name.lower().endswith(".parquet"):
        yield from _of_parquet(source, split.name)
    else:
        yield from _of_tar(source, split.name)


def of_folder(source: Folder, row: Listed) -> Sample | Rejected:
    """An image of a folder and its captions."""
    try:
        text, short = row.captions(source)
        return Sample(row.name, source.read(row.name), text, short)
    except GONE as error:
        return Rejected(source=row.name, why=why_damaged(error))


def _of_parquet(source: Folder, name: str) -> Iterator[Sample | Rejected]:
    with source.open(name) as opened:
        try:
            file = pq.ParquetFile(opened)
        except pa.ArrowInvalid as error:
            yield Rejected(source=name, why=str(error))
            return
        there = file.schema_arrow.names
        if not {"image", "text"} <= set(there):
            raise DataError(f"{source}/{name}: has columns {', '.join(there)}\nhint: needs `image` and `text`")
        columns = [column for column in ("image", "text", "text_short") if column in there]
        row = 0
        try:
            for batch in file.iter_batches(_ROWS_AT_A_TIME, columns=columns):
                for one in batch.to_pylist():
                    yield _of_row(f"{name}:{row}", one)
                    row += 1
        except pa.ArrowInvalid as error:
            yield Rejected(source=f"{name}:{row}", why=f"the file is damaged from here on: {error}")


def _of_row(source: str, row: Mapping[str, Any]) -> Sample | Rejected:
    image = row["image"]
    raw = image.get("bytes") if isinstance(image, dict) else image
    if not isinstance(raw, bytes):
        return Rejected(source=source, why="no bytes of an image")
    return Sample(source, raw, row["text"] or "", row.get("text_short") or "")


def _of_tar(source: Folder, name: str) -> Iterator[Sample | Rejected]:
    """Files whose paths are the same up to the first dot of the file's name are a sample; they follow each other."""
    known, files = "", dict[str, bytes]()
    try:
        # Read once from front to end: a tar has no list of contents.
        with source.open(name) as opened, tarfile.open(fileobj=opened, mode="r|*") as tar:
            for member in tar:
                if not member.isfile():
                    continue
                folder, slash, base = member.name.rpartition("/")
                stem, dot, ending = base.partition(".")
                if folder + slash + stem != known and files:
                    yield _of_files(f"{name}:{known}", files)
                    files = {}
                known = folder + slash + stem
                content = tar.extractfile(member)
                files[dot + ending.lower()] = content.read() if content is not None else b""
    except (tarfile.TarError, EOFError) as error:
        files = {}
        after = f"after {known}: " if known else ""
        yield Rejected(source=name, why=f"the file is damaged: {after}{error}")
    if files:
        yield _of_files(f"{name}:{known}", files)


def _of_files(source: str, files: Mapping[str, bytes]) -> Sample | Rejected:
    image = next((raw for ending, raw in files.items() if ending in IMAGES), None)
    if image is None:
        return Rejected(source=source, why=f"no image: has {', '.join(sorted(files))}")
    text, short = (files.get(ending, b"").decode("utf-8", "replace").strip() for ending in (LONG, SHORT))
    if not text and ".json" in files:
        try:
            row = json.loads(files[".json"])
            text, short = str(row["text"]), str(row.get("text_short") or "")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return Rejected(source=source, why=f"its .json: {type(error).__name__}: {error}")
    return Sample(source, image, text, short)
