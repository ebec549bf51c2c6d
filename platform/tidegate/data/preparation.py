"""A preparation that many processes share and that may be killed at any time: what `jobs/prepare_data.py` does.

    parts    each split of the source is read once, its samples decoded, cut and kept as parts     out/.work/parts
    plan     all samples in the order of the shuffle, cut into shards                              nothing is written
    shards   each gathers its rows from the parts                                                   out/train-*.parquet
    index    written last; then the parts go                                                        out/index.json

The output depends on the source and the settings alone: not on how many processes there were, nor on how often they
were killed. A part or a shard that is there is not made again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import Field, ValidationError
from safetensors.numpy import save

from tidegate.data import parts
from tidegate.data.buckets import Limits, Size, block_rows, cut, sizes
from tidegate.data.layout import EMPTY_CAPTION, INDEX, REJECTED, SCHEMA, Index, Rejected, ShardSeen, lines, shard_name
from tidegate.data.prepare import SHOWN, check_rows, nothing_usable
from tidegate.data.shards import parquet, seen
from tidegate.data.sources import Split, read, splits
from tidegate.data.states import Halves, StatesSeen, shard_metadata
from tidegate.data.storage import Folder
from tidegate.errors import DataError
from tidegate.spec.policy import Model

WORK = ".work"
_SETTINGS = "settings.json"
_STATES = "states.json"
_SHARD_BYTES = 1 << 30


class Settings(Model):
    """What decides the output, beside the source."""

    source: str
    out: str
    seed: int = 0
    rows_per_shard: int = 8192
    """At most; fewer where a shard would have more than a GiB."""
    resolution: int | None = None
    """Images are brought to about this many pixels squared; None keeps their sizes."""
    multiple: int = Field(default=16, ge=1)
    """Of which both sides are multiples; the VAE's factor times the patch."""
    bucket_aspect_max: float = Field(default=2.0, ge=1)
    """The longest bucket; 1 has squares alone."""
    side_min: int = Field(default=1, ge=1)
    aspect_max: float = Field(default=4.0, ge=1)
    rows_per_part: int = Field(default=1024, ge=1)
    pipeline: str | None = None
    """A diffusers pipeline with the encoders for `latents` and `text_length`."""
    latents: bool = False
    text_length: int | None = Field(default=None, ge=1)
    """Tokens of a caption at most; None: no text states."""
    encode_batch: int = Field(default=32, ge=1)
    keep_images: bool = False
    """Beside their latents."""

    @property
    def encodes(self) -> bool:
        return self.latents or self.text_length is not None

    def limits(self) -> Limits:
        among = (
            sizes(self.resolution, multiple=self.multiple, aspect_max=self.bucket_aspect_max)
            if self.resolution is not None
            else ()
        )
        return Limits(sizes=among, side_min=self.side_min, aspect_max=self.aspect_max)


@dataclass(frozen=True, slots=True)
class ShardPlan:
    name: str
    size: Size
    block_rows: int
    parts: tuple[str, ...]
    """Files that hold its rows."""
    part_of_row: Any
    """(rows,) which of `parts`."""
    row_in_part: Any
    """(rows,)"""


class Preparation:
    """Of one source. Travels to other processes."""

    def __init__(self, settings: Settings) -> None:
        """
        Raises:
            DataError: the settings ask for nothing possible.
        """
        check_rows(settings.rows_per_shard)
        if settings.encodes and settings.pipeline is None:
            raise DataError("latents and text states need their encoders\nhint: --pipeline FOLDER")
        if settings.latents and settings.resolution is None:
            raise DataError("latents are of images brought to a size\nhint: --resolution, e.g. 256")
        self.settings, self._limits = settings, settings.limits()
        self.source, self.out = Folder.at(settings.source), Folder.at(settings.out)
        self.work = self.out / WORK
        self._parts, self._made = self.work / "parts", self.work / "shards"

    def begin(self) -> dict[int, Split]:
        """The splits that are still to be read, by number.

        Raises:
            DataError: nothing to read, or something else is at `out`.
        """
        if self.out.size(INDEX) is not None:
            self.work.remove()
            raise DataError(f"{self.out}: is prepared already\nhint: remove it, or write to another folder")
        all_splits = splits(self.source, self.settings.rows_per_part)
        digest = hashlib.sha256(repr(all_splits).encode()).hexdigest()
        now = _Begun(settings=self.settings, splits=digest)
        before = _read_begun(self.work)
        if before is None:
            if self.out.files():
                raise DataError(f"{self.out}: exists and is not empty\nhint: remove it, or write to another folder")
            self.work.write(_SETTINGS, now.model_dump_json(indent=2).encode())
        elif before != now:
            what = "another source" if before.settings == self.settings else "other settings"
            raise DataError(f"{self.out}: was begun with {what}\nhint: remove it, or go on as it was begun")
        done = parts.whole_splits(self._parts.files())
        return {number: split for number, split in enumerate(all_splits) if number not in done}

    def read(self, number: int, split: Split) -> Iterator[tuple[str, bytes]]:
        """Name and content of each part of a split that is not there yet."""
        there = set(self._parts.files())
        samples = read(self.source, split)
        for part, (chunk, last) in enumerate(parts.chunks(samples, self.settings.rows_per_part)):
            name = parts.part_name(number, part, last=last)
            if name not in there:
                yield name, parts.to_bytes(parts.table(chunk, self._limits, self.settings.seed))

    def keep_encoders(self, seen: StatesSeen, empty: Halves) -> None:
        """What the encoders are, and what they make of no caption; whoever has loaded them tells, all the same."""
        if seen.text is not None:
            self.out.write(EMPTY_CAPTION, save({"states": empty}))
        self.work.write(_STATES, seen.model_dump_json().encode())

    def keep(self, name: str, part: bytes) -> None:
        self._parts.write(name, part)

    def plan(self) -> list[ShardPlan]:
        """The shards that are still to be made; every part is there.

        Raises:
            DataError: no sample is of use.
        """
        names = tuple(sorted(self._parts.files()))
        found = [parts.read_keys(self._parts, name)[0] for name in names]
        if not sum(map(len, found)):
            raise nothing_usable(self.settings.source, self._rejected())
        part_of_row = np.repeat(np.arange(len(names), dtype=np.int32), [len(keys) for keys in found])
        row_in_part = np.concatenate([np.arange(len(keys), dtype=np.int32) for keys in found])
        keys = np.concatenate(found)
        # The parts' order settles what the keys leave open.
        by_key = np.lexsort((row_in_part, part_of_row, keys["key"], keys["height"], keys["width"]))
        block = self._block_rows(len(keys))
        rows_per_shard = max(1, min(self.settings.rows_per_shard, int(_SHARD_BYTES / self._row_bytes(len(keys)))))
        there = self._made.files()
        plans = []
        cuts = list(_cuts(keys[by_key], rows_per_shard))
        for number, (size, rows) in enumerate(cuts):
            name = shard_name(number, len(cuts))
            if f"{name}.json" not in there:
                mine = by_key[rows.start : rows.stop]
                used, which = np.unique(part_of_row[mine], return_inverse=True)
                files = tuple(names[part] for part in used)
                plans.append(ShardPlan(name, size, block, files, which, row_in_part[mine]))
        return plans

    def write_shard(self, plan: ShardPlan) -> ShardSeen:
        """Gather a shard's rows and write it."""
        taken, places = [], []
        for part, name in enumerate(plan.parts):
            # In ascending order of the part's rows too, since both are sorted by key: as `take` answers.
            mine = np.flatnonzero(plan.part_of_row == part)
            taken.append(parts.take(self._parts, name, plan.row_in_part[mine]))
            places.append(mine)
        order = np.argsort(np.concatenate(places))
        table = pa.concat_tables(taken).take(pa.array(order))
        table = table.replace_schema_metadata(shard_metadata(table.column_names, SCHEMA.metadata))
        data = parquet(table, plan.block_rows)
        shard = seen(plan.name, data, table.num_rows, plan.size)
        self.out.write(plan.name, data)
        # The shard is made when this is there.
        self._made.write(f"{plan.name}.json", shard.model_dump_json().encode())
        return shard

    def finish(self) -> Index:
        """Write the index; all shards are there."""
        made = [ShardSeen.model_validate_json(self._made.read(name)) for name in self._made.files()]
        rejected = self._rejected()
        index = Index(
            seed=self.settings.seed,
            rows=sum(shard.rows for shard in made),
            block_rows=self._block_rows(sum(shard.rows for shard in made)),
            shards=tuple(made),
            pictures=self.settings.keep_images or not self.settings.latents,
            states=self._states(),
            rejected_rows=len(rejected),
            rejected_first=tuple(rejected[:SHOWN]),
        )
        self.out.write(REJECTED, lines(rejected))
        self.out.write(INDEX, index.model_dump_json(indent=2).encode() + b"\n")
        self.work.remove()
        return index

    def _rejected(self) -> list[Rejected]:
        return [row for name in self._parts.files() for row in parts.read_keys(self._parts, name)[1]]

    def _states(self) -> StatesSeen:
        if not self.settings.encodes:
            return StatesSeen()
        return StatesSeen.model_validate_json(self.work.read(_STATES))

    def _block_rows(self, rows: int) -> int:
        return block_rows(self._row_bytes(rows))

    def _row_bytes(self, rows: int) -> float:
        return sum(self._parts.files().values()) / rows


class _Begun(Model):
    """What the parts that lie there were made from."""

    settings: Settings
    splits: str


def _read_begun(work: Folder) -> _Begun | None:
    try:
        return _Begun.model_validate_json(work.read(_SETTINGS))
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise DataError(f"{work}/{_SETTINGS}: {error.errors()[0]['msg']}\nhint: remove {work}") from None


def _cuts(ordered: Any, rows_per_shard: int) -> Iterator[tuple[Size, range]]:
    """(size, rows) of each shard, over keys in the order of the shuffle."""
    edges = np.flatnonzero((np.diff(ordered["width"]) != 0) | (np.diff(ordered["height"]) != 0)) + 1
    starts = [0, *edges.tolist(), len(ordered)]
    for start, end in pairwise(starts):
        size = Size(int(ordered["width"][start]), int(ordered["height"][start]))
        for rows in cut(end - start, rows_per_shard):
            yield size, range(start + rows.start, start + rows.stop)
