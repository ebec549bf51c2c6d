"""Texts that were encoded already, as long as there is room for them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from torch import Tensor

T = TypeVar("T")


class Embeddings:
    """Encoded texts by whatever tells them apart; the least lately used go first. For one thread."""

    def __init__(self, limit_bytes: int) -> None:
        """`limit_bytes` of device memory; 0: nothing is kept."""
        self._limit_bytes = limit_bytes
        self._kept: OrderedDict[Hashable, Any] = OrderedDict()
        self.bytes = 0
        self.hits = 0
        self.misses = 0

    def get(self, key: Hashable, encode: Callable[[], T]) -> T:
        """What is kept under `key`, else what `encode()` gives: tensors, alone or in tuples. They are shared, so nobody
        may write into them."""
        if key in self._kept:
            self.hits += 1
            self._kept.move_to_end(key)
            kept: T = self._kept[key]
            return kept
        self.misses += 1
        encoded = encode()
        size = _bytes_of(encoded)
        if size <= self._limit_bytes:
            self._kept[key] = encoded
            self.bytes += size
        while self.bytes > self._limit_bytes:
            _, oldest = self._kept.popitem(last=False)
            self.bytes -= _bytes_of(oldest)
        return encoded


def _bytes_of(encoded: object) -> int:
    if isinstance(encoded, Tensor):
        # The storage's, not the view's: a row of a large batch keeps the whole batch alive.
        return encoded.untyped_storage().nbytes()
    return sum(map(_bytes_of, encoded)) if isinstance(encoded, (tuple, list)) else 0
