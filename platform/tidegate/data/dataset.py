"""A prepared data set, read by sample id: row groups by demand, a bounded number of bytes at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load

from tidegate.data.buckets import Size
from tidegate.data.groups import Captions, Group, Groups
from tidegate.data.layout import EMPTY_CAPTION, Index, fingerprint, read_index
from tidegate.data.order import Ids, order
from tidegate.data.states import LATENT, TEXT_STATES, Halves
from tidegate.data.storage import Folder
from tidegate.errors import DataError

CACHE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Rows:
    """Samples of one size, in the order they were asked for."""

    size: Size
    captions: list[Captions]
    pixels: NDArray[np.uint8] | None
    """(B, H, W) for one channel, else (B, H, W, C); None where latents are read in their place."""
    latents: Halves | None
    """(B, C, H/factor, W/factor), as the autoencoder gave them."""
    text_states: list[Halves] | None
    """Of each caption (tokens, layers, width)."""


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
        latents: bool = False,
        text_length: int | None = None,
        buckets: bool = False,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        """
        Args:
            channels: of a picture; 1 grey, 3 RGB. With `latents` those of a latent.
            latents: read these in place of the pictures.
            text_length: read the text states beside the captions, for batches of so many tokens.
            buckets: images of other sizes than `width` x `height` are welcome.
            cache_bytes: how much of what was read is kept. A data set whose pixels fit is decoded once.

        Raises:
            DataError: the folder is no data set, its images are not of the size, or it lacks what is to be read.
        """
        self.folder, self.channels = Folder.at(place), channels
        self.index: Index = read_index(self.folder)
        self.fingerprint = fingerprint(self.index)
        self.latents = self.index.states.latents if latents else None
        self.text = self.index.states.text if text_length is not None else None
        self.text_length = text_length
        self._check(Size(width, height), latents=latents, text_states=text_length is not None, buckets=buckets)
        self.bucket_rows = tuple(self.index.buckets.values())
        shards, block = self.index.shards, self.index.block_rows
        self._groups = [(shard, first // block) for shard in shards for first in range(0, shard.rows, block)]
        self._starts = np.cumsum([0, *(min(block, shard.rows - group * block) for shard, group in self._groups)])
        pixels = sum(shard.rows * shard.width * shard.height * channels for shard in shards)
        self._keep_decoded = not latents and pixels <= cache_bytes
        columns = [
            "text",
            "text_short",
            LATENT if latents else "image",
            *([TEXT_STATES] if text_length is not None else []),
        ]
        self._cache = Groups(self.folder, columns, cache_bytes)

    def _check(self, want: Size, *, latents: bool, text_states: bool, buckets: bool) -> None:
        if not buckets and set(self.index.buckets) != {want}:
            have = ", ".join(f"{count} of {size}" for size, count in self.index.buckets.items())
            raise DataError(
                f"{self.folder}: images must be {want}, has {have}\nhint: set image.width and image.height, "
                f"or prepare with another --resolution"
            )
        if not latents and not self.index.pictures:
            raise DataError(
                f"{self.folder}: holds no pictures, only latents\nhint: set image.latent_factor, "
                "or prepare with --keep-images"
            )
        for name, wanted, there in (("latents", latents, self.latents), ("text states", text_states, self.text)):
            if wanted and there is None:
                raise DataError(
                    f"{self.folder}: has no {name}\nhint: prepare with --pipeline, --latents, --text-length"
                )
        if self.latents is not None and self.latents.channels != self.channels:
            raise DataError(
                f"{self.folder}: latents have {self.latents.channels} channels, the config says {self.channels}\n"
                "hint: set image.channels"
            )

    def empty_caption(self) -> Halves:
        """The text states (tokens, layers, width) of no caption.

        Raises:
            DataError: they can't be read.
        """
        try:
            found: Halves = load(self.folder.read(EMPTY_CAPTION))["states"]
        except (OSError, KeyError, SafetensorError) as error:
            raise DataError(f"{self.folder}/{EMPTY_CAPTION}: {error}\nhint: prepare the data again") from None
        return found

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
        return _captions(self._parts(ids), len(ids))

    def rows(self, ids: Ids) -> Rows:
        """Samples of one size.

        Raises:
            DataError: a shard can't be read or an image doesn't decode; names shard and row.
        """
        size, parts = self.place(int(ids[0])).size, self._parts(ids)
        pixels = latents = texts = None
        if self.latents is None:
            pixels = np.empty((len(ids), *self._shape(size)), np.uint8)
            for places, group, rows in parts:
                group.decode(rows, self.channels, pixels, places)
        else:
            factor = self.latents.factor
            shape = self.latents.channels, size.height // factor, size.width // factor
            latents = np.empty((len(ids), *shape), np.float16)
            for place, group, row in _each(parts):
                latents[place] = group.states(LATENT, row).reshape(shape)
        if self.text is not None:
            texts = [np.empty((0, 0, 0), np.float16)] * len(ids)
            for place, group, row in _each(parts):
                texts[place] = group.states(TEXT_STATES, row).reshape(-1, self.text.layers, self.text.width)
        return Rows(size, _captions(parts, len(ids)), pixels, latents, texts)

    def _parts(self, ids: Ids) -> list[Part]:
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


Part = tuple[Ids, Group, Ids]
"""(places of samples in what was asked for, the group that holds them, their rows in it)"""


def _each(parts: Sequence[Part]) -> Iterator[tuple[int, Group, int]]:
    for places, group, rows in parts:
        for place, row in zip(places.tolist(), rows.tolist(), strict=True):
            yield place, group, row


def _captions(parts: Sequence[Part], count: int) -> list[Captions]:
    found = dict[int, Captions]()
    for places, group, rows in parts:
        found.update(zip(places.tolist(), map(group.captions.__getitem__, rows.tolist()), strict=True))
    return [found[place] for place in range(count)]
