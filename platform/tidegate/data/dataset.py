"""A prepared data set, read by sample id: row groups by demand, a bounded number of bytes at a time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidegate.data.buckets import Size
from tidegate.data.groups import Group, Groups
from tidegate.data.layout import Index, fingerprint, read_index
from tidegate.data.order import Ids, order
from tidegate.data.storage import Folder
from tidegate.errors import DataError

CACHE_BYTES = 256 << 20
_COLUMNS = ("image", "text", "text_short")


@dataclass(frozen=True, slots=True)
class Captions:
    long: str
    short: str
    """Empty where a sample has none."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Samples of one size, in the order they were asked for."""

    size: Size
    pixels: NDArray[np.uint8]
    """(B, H, W) for one channel, else (B, H, W, C)."""
    captions: list[Captions]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a sample lies."""

    shard: str
    row: int
    size: Size


class Dataset:
    """What `jobs/prepare_data.py` has written. May be used by several threads at a time."""

    def __init__(
        self,
        place: str | Path,
        *,
        width: int,
        height: int,
        channels: int,
        buckets: bool = False,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        """
        Args:
            buckets: images of other sizes than `width` x `height` are welcome.
            cache_bytes: how much of what was read is kept. A data set whose pixels fit is decoded once.

        Raises:
            DataError: the folder is no data set, or its images are not of the size.
        """
        self.folder, self.channels = Folder.at(place), channels
        self.index: Index = read_index(self.folder)
        self.fingerprint = fingerprint(self.index)
        want = Size(width, height)
        if not buckets and set(self.index.buckets) != {want}:
            have = ", ".join(f"{count} of {size}" for size, count in self.index.buckets.items())
            raise DataError(
                f"{place}: images must be {want}, has {have}\nhint: set image.width and image.height, "
                f"or prepare with another --resolution"
            )
        self.bucket_rows = tuple(self.index.buckets.values())
        shards, block = self.index.shards, self.index.block_rows
        self._groups = [(shard, first // block) for shard in shards for first in range(0, shard.rows, block)]
        self._starts = np.cumsum([0, *(min(block, shard.rows - group * block) for shard, group in self._groups)])
        pixels = sum(shard.rows * shard.width * shard.height * channels for shard in shards)
        self._keep_decoded = pixels <= cache_bytes
        self._cache = Groups(self.folder, _COLUMNS, cache_bytes)

    def __len__(self) -> int:
        return self.index.rows

    def ids(self, seed: int, step: int, global_batch: int) -> Ids:
        """Of the global batch of `step`, from 0."""
        return order(seed, step, global_batch, self.bucket_rows, self.index.block_rows)

    def place(self, sample: int) -> Place:
        number = int(np.searchsorted(self._starts, sample, side="right")) - 1
        shard, group = self._groups[number]
        return Place(shard.name, group * self.index.block_rows + sample - int(self._starts[number]), shard.size)

    def captions(self, ids: Ids) -> list[Captions]:
        """Without a look at the images.

        Raises:
            DataError: a shard can't be read.
        """
        found: list[Captions] = [Captions("", "")] * len(ids)
        for places, group, rows in self._parts(ids):
            for place, row in zip(places.tolist(), rows.tolist(), strict=True):
                found[place] = Captions(group.texts[row], group.short_texts[row])
        return found

    def rows(self, ids: Ids) -> Rows:
        """Samples of one size.

        Raises:
            DataError: a shard can't be read or an image doesn't decode; names shard and row.
        """
        size = self.place(int(ids[0])).size
        pixels = np.empty((len(ids), *self._shape(size)), np.uint8)
        for places, group, rows in self._parts(ids):
            pixels[places] = group.decode(rows, self.channels)
        return Rows(size, pixels, self.captions(ids))

    def _parts(self, ids: Ids) -> list[tuple[Ids, Group, Ids]]:
        """(places in `ids`, the group that holds them, their rows in it)."""
        numbers = np.searchsorted(self._starts, ids, side="right") - 1
        parts = [(np.flatnonzero(numbers == number), int(number)) for number in np.unique(numbers)]
        return [(places, self._group(number), ids[places] - self._starts[number]) for places, number in parts]

    def _group(self, number: int) -> Group:
        shard, group = self._groups[number]
        start, shape, keep = group * self.index.block_rows, self._shape(shard.size), self._keep_decoded
        name = f"{self.folder}/{shard.name}"

        def made(table: Any) -> Group:
            return Group(name, start, table, shape, keep_decoded=keep)

        return self._cache.get(shard.name, group, made)

    def _shape(self, size: Size) -> tuple[int, ...]:
        return (size.height, size.width) if self.channels == 1 else (size.height, size.width, self.channels)
