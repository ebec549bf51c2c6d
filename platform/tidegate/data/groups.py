"""The unit of reading: a row group of a shard, column-wise. Bytes stay where Arrow has put them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from tidegate.data.order import Ids
from tidegate.data.pictures import DAMAGED, decoded
from tidegate.data.states import LATENT, TEXT_STATES, Halves, numbers
from tidegate.data.storage import Folder
from tidegate.errors import DataError


@dataclass(frozen=True, slots=True)
class Captions:
    long: str
    short: str
    """Empty where a sample has none."""


class Group:
    """Some neighbouring rows of a shard, whichever columns were read."""

    def __init__(self, name: str, start: int, table: Any, shape: Sequence[int], *, keep_decoded: bool) -> None:
        """
        Args:
            start: row of the shard at which the group begins.
            shape: of one decoded image.
            keep_decoded: decode each image once.
        """
        self.name, self.start, self.bytes = name, start, int(table.nbytes)
        table = table.combine_chunks()
        texts = zip(table["text"].to_pylist(), table["text_short"].to_pylist(), strict=True)
        self.captions = [Captions(long, short or "") for long, short in texts]
        there = table.column_names
        self._images = _Binaries(table["image"].combine_chunks().field("bytes")) if "image" in there else None
        self._numbers = {column: numbers(table[column]) for column in (LATENT, TEXT_STATES) if column in there}
        self._pixels = np.empty((table.num_rows, *shape), np.uint8) if keep_decoded else None
        self._known = np.zeros(table.num_rows, bool)

    def states(self, column: str, row: int) -> Halves:
        """The numbers of one row, in one dimension; a view."""
        values, offsets = self._numbers[column]
        return values[offsets[row] : offsets[row + 1]]

    def decode(self, rows: Ids, channels: int, into: NDArray[np.uint8], places: Ids) -> None:
        """Images at `rows` of the group into `into[places]`.

        Raises:
            DataError: one doesn't decode.
        """
        if self._pixels is None:
            for place, row in zip(places.tolist(), rows.tolist(), strict=True):
                self._decode(row, channels, into[place])
            return
        if not self._known[rows].all():
            for row in rows[~self._known[rows]].tolist():
                self._decode(row, channels, self._pixels[row])
                self._known[row] = True
        into[places] = self._pixels[rows]

    def _decode(self, row: int, channels: int, into: NDArray[np.uint8]) -> None:
        assert self._images is not None
        try:
            decoded(self._images[row], channels, into)
        except DAMAGED as error:
            raise DataError(f"{self.name}, row {self.start + row}: {error}\nhint: prepare the data again") from None


class _Binaries:
    """A binary column without a Python object for each row."""

    def __init__(self, column: Any) -> None:
        _, offsets, data = column.buffers()
        self._offsets = np.frombuffer(offsets, np.int32)[column.offset : column.offset + len(column) + 1].tolist()
        self._data = memoryview(data)

    def __getitem__(self, row: int) -> memoryview:
        return self._data[self._offsets[row] : self._offsets[row + 1]]


class Groups:
    """Row groups that were read, the least recently used forgotten beyond `cache_bytes`. Safe for threads."""

    def __init__(self, folder: Folder, columns: Sequence[str], cache_bytes: int) -> None:
        self._folder, self._columns, self._cache_bytes = folder, list(columns), cache_bytes
        self._read: OrderedDict[tuple[str, int], Group] = OrderedDict()
        self._files: dict[str, Any] = {}
        self._locks: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[Groups], tuple[Folder, list[str], int]]:
        """Another process reads for itself."""
        return Groups, (self._folder, self._columns, self._cache_bytes)

    def get(self, shard: str, number: int, made: Callable[[Any], Group]) -> Group:
        """Row group `number` of a shard; `made` turns the table that was read into it.

        Raises:
            DataError: the shard can't be read.
        """
        key = shard, number
        with self._lock:
            lock = self._locks.setdefault(shard, threading.Lock())
        # One thread reads a shard at a time: the second finds what the first has read.
        with lock:
            with self._lock:
                if key in self._read:
                    self._read.move_to_end(key)
                    return self._read[key]
            try:
                if shard not in self._files:
                    self._files[shard] = pq.ParquetFile(self._folder.open(shard))
                group = made(self._files[shard].read_row_group(number, columns=self._columns))
            except (OSError, KeyError, ValueError, IndexError) as error:  # pyarrow's ArrowInvalid is a ValueError
                raise DataError(f"{self._folder}/{shard}: {error}\nhint: prepare the data again") from None
            with self._lock:
                self._read[key] = group
                while len(self._read) > 1 and sum(one.bytes for one in self._read.values()) > self._cache_bytes:
                    self._read.popitem(last=False)
            return group
