"""Batches for one rank, read ahead in a thread. The position is the step and nothing else."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from torch import Tensor

from tidegate.data.layout import Index, decode, fingerprint, read_index
from tidegate.data.order import order, share_range
from tidegate.errors import DataError

_READ_AHEAD = 2
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Batch:
    """One rank's part of the global batch of `step`."""

    step: int
    """From 0."""
    pixels: Tensor
    """(B, C, H, W) float32 in [-1, 1]."""
    captions: tuple[str, ...]
    ids: tuple[int, ...]
    positions: range
    """Where these samples stand in the global batch."""


class Dataset:
    """A prepared data set. Shards are read when first touched and stay in memory; images are decoded when used."""

    def __init__(self, folder: Path, *, width: int, height: int, channels: int) -> None:
        """
        Raises:
            DataError: the folder is no data set, or its images are not `width` x `height`.
        """
        self.folder, self.channels = folder, channels
        self.index: Index = read_index(folder)
        self.fingerprint = fingerprint(self.index)
        want = f"{width}x{height}"
        if set(self.index.sizes) != {want}:
            have = ", ".join(f"{count} of {size}" for size, count in self.index.sizes.items())
            raise DataError(
                f"{folder}: images must be {want}, has {have}\nhint: set image.width and image.height, "
                f"or resize before preparing"
            )
        self._ends = np.cumsum([shard.rows for shard in self.index.shards])
        self._tables: dict[int, Any] = {}

    def __len__(self) -> int:
        return self.index.rows

    def row(self, sample: int) -> tuple[Tensor, str]:
        """Pixels (C, H, W) uint8 and caption.

        Raises:
            DataError: the shard can't be read or the image doesn't decode; names shard and row.
        """
        number = int(np.searchsorted(self._ends, sample, side="right"))
        row = sample - (int(self._ends[number - 1]) if number else 0)
        images, texts = self._shard(number)
        try:
            pixels = np.array(decode(images[row].as_py(), self.channels), dtype=np.uint8)
        except OSError as error:
            raise DataError(f"{self._path(number)}, row {row}: {error}\nhint: prepare the data again") from None
        tensor = torch.from_numpy(pixels)
        return (tensor[None] if self.channels == 1 else tensor.permute(2, 0, 1)), texts[row].as_py()

    def _shard(self, number: int) -> tuple[Any, Any]:
        if number not in self._tables:
            try:
                table = pq.read_table(self._path(number), memory_map=True).combine_chunks()
                images, texts = table["image"].chunk(0).field("bytes"), table["text"].chunk(0)
            except (OSError, KeyError, ValueError) as error:  # pyarrow's ArrowInvalid is a ValueError
                raise DataError(f"{self._path(number)}: {error}\nhint: prepare the data again") from None
            self._tables[number] = images, texts
        images, texts = self._tables[number]
        return images, texts

    def _path(self, number: int) -> Path:
        return self.folder / self.index.shards[number].name


class Loader:
    """Iterates over one rank's batches from `start_step` to `end_step`. A context manager: leaving ends the thread."""

    def __init__(
        self, data: Dataset, *, seed: int, global_batch: int, rank: int, world_size: int, start_step: int, end_step: int
    ) -> None:
        self._data, self._seed, self._global_batch = data, seed, global_batch
        self._positions = share_range(global_batch, rank, world_size)
        self._steps = range(start_step, end_step)
        self._ready: queue.Queue[Batch | BaseException | None] = queue.Queue(_READ_AHEAD)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._read_ahead, name="read-ahead", daemon=True)

    def __enter__(self) -> Loader:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._thread.join()

    def __iter__(self) -> Iterator[Batch]:
        while True:
            item = self._ready.get()
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            yield item

    def batch(self, step: int) -> Batch:
        """This rank's part of the global batch of `step`."""
        ids = order(self._seed, step, self._global_batch, len(self._data))[self._positions.start : self._positions.stop]
        rows = [self._data.row(int(sample)) for sample in ids]
        pixels = torch.stack([image for image, _ in rows]).float().div_(127.5).sub_(1)
        captions = tuple(caption for _, caption in rows)
        return Batch(step, pixels, captions, tuple(int(sample) for sample in ids), self._positions)

    def _read_ahead(self) -> None:
        try:
            for step in self._steps:
                if not self._put(self.batch(step)):
                    return
            self._put(None)
        # Whatever it is, it belongs to the thread that waits for the batch.
        except BaseException as error:
            self._put(error)

    def _put(self, item: Batch | BaseException | None) -> bool:
        while not self._closing.is_set():
            try:
                self._ready.put(item, timeout=_POLL_S)
                return True
            except queue.Full:
                continue  # the consumer is busy with a step; look again whether it still wants one
        return False
