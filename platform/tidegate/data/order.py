"""Which samples a step sees: a pure function of seed and step, so any step's samples can be listed later.

Images of one size are a bucket, and a global batch comes from one bucket. A bucket's samples are a stream, one shuffled
epoch after the other, cut into global batches; a batch may span two epochs, so nothing is repeated or skipped within
one, and none is cut short. In each epoch every bucket has as many turns as batches begin in that epoch of its stream.
How many ranks share a batch changes nothing.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Words = NDArray[np.uint64]

_ROUNDS = 8
_WHOLE = 2**62
_TURNS = 0x7475726E73
"""Keeps the draw of turns apart from the draws of samples."""


def order(seed: int, step: int, global_batch: int, rows: int | Sequence[int], block_rows: int = _WHOLE) -> Ids:
    """The ids of the global batch of `step` (from 0), shape (global_batch,).

    Args:
        rows: of each bucket; a bucket's ids follow those of the one before. A number stands for one bucket.
        block_rows: an epoch visits a bucket's blocks of so many neighbours in random order, and the samples of each in
            random order, so that a reader needs few blocks at a time. The last block, which may be shorter, is last.
    """
    sizes = (rows,) if isinstance(rows, int) else tuple(rows)
    if not sizes or min(sizes) < 1 or global_batch < 1 or step < 0 or block_rows < 1:
        got = f"step {step}, batch {global_batch}, blocks of {block_rows}, rows {rows}"
        raise ValueError(f"needs step >= 0, and a batch, blocks and buckets of at least 1, got {got}")
    bucket, turn = turn_of(seed, step, global_batch, sizes)
    places = np.arange(turn * global_batch, (turn + 1) * global_batch, dtype=np.int64)
    epochs, offsets = np.divmod(places, sizes[bucket])
    ids = np.empty_like(places)
    for epoch in np.unique(epochs):
        inside = epochs == epoch
        keys = _keys(seed ^ (bucket * 0x9E3779B97F4A7C15), int(epoch))
        ids[inside] = _in_blocks(keys, offsets[inside], sizes[bucket], block_rows)
    return ids + sum(sizes[:bucket])


def turn_of(seed: int, step: int, global_batch: int, rows: Sequence[int]) -> tuple[int, int]:
    """(bucket whose turn `step` is, number of its batch, from 0)."""
    if len(rows) == 1:
        return 0, step
    epoch = _epoch(step, global_batch, rows)
    begun = [_begun(epoch, size, global_batch) for size in rows]
    turns = _turns(seed, epoch, global_batch, tuple(rows))
    place = step - sum(begun)
    bucket = int(turns[place])
    return bucket, begun[bucket] + int(np.count_nonzero(turns[:place] == bucket))


def epoch_of(step: int, global_batch: int, rows: int | Sequence[int]) -> tuple[int, int]:
    """(epoch, place in it) of `step`: of its first sample where there is one bucket, else of its turn."""
    if isinstance(rows, int):
        return divmod(step * global_batch, rows)
    epoch = _epoch(step, global_batch, rows)
    return epoch, step - sum(_begun(epoch, size, global_batch) for size in rows)


def share(ids: Ids, rank: int, world_size: int) -> Ids:
    """The contiguous part of `ids` that `rank` works on; the first ranks take one more where it doesn't divide."""
    part = share_range(len(ids), rank, world_size)
    return ids[part.start : part.stop]


def share_range(total: int, rank: int, world_size: int) -> range:
    """As `share`, as positions in the global batch."""
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be in [0, {world_size}), got {rank}")
    each, more = divmod(total, world_size)
    start = rank * each + min(rank, more)
    return range(start, start + each + (rank < more))


def _begun(epoch: int, size: int, global_batch: int) -> int:
    """How many batches of a bucket's stream begin before its `epoch`."""
    return -(-epoch * size // global_batch)


def _epoch(step: int, global_batch: int, rows: Sequence[int]) -> int:
    # At least epoch · samples / batch steps lie before an epoch, which bounds the search.
    above = step * global_batch // sum(rows) + 2

    def steps_before(epoch: int) -> int:
        return sum(_begun(epoch, size, global_batch) for size in rows)

    return bisect_right(range(above), step, key=steps_before) - 1


@lru_cache(maxsize=4)
def _turns(seed: int, epoch: int, global_batch: int, rows: tuple[int, ...]) -> NDArray[np.uint16]:
    """Whose turn each step of `epoch` is. A table of the whole epoch, kept for the next step."""
    counts = [_begun(epoch + 1, size, global_batch) - _begun(epoch, size, global_batch) for size in rows]
    waiting = np.repeat(np.arange(len(rows), dtype=np.uint16), counts)
    return waiting[_permuted(_keys(seed ^ _TURNS, epoch), np.arange(len(waiting)), len(waiting))]


def _in_blocks(keys: Words, offsets: Ids, size: int, block_rows: int) -> Ids:
    """A permutation of [0, size) at `offsets`: whole blocks are permuted, then the places in each."""
    if block_rows >= size:
        return _permuted(keys, offsets, size)
    whole = size // block_rows
    blocks, places = np.divmod(offsets, block_rows)
    ids = np.empty_like(offsets)
    full = blocks < whole
    for part, count in ((full, block_rows), (~full, size - whole * block_rows)):
        if part.any():
            block = _permuted(keys, blocks[part], whole) if part is full else blocks[part]
            inner = _mix(keys ^ _mix(block.astype(np.uint64) + np.uint64(1)))
            ids[part] = block * block_rows + _permuted(inner, places[part], count)
    return ids


def _keys(seed: int, epoch: int) -> Words:
    """One key a round, shape (rounds, 1)."""
    rounds = np.arange(_ROUNDS, dtype=np.uint64) + np.uint64((epoch + 1) << 8)
    return _mix(np.uint64(seed % 2**64) ^ _mix(rounds))[:, None]


def _permuted(keys: Words, offsets: Ids, size: int) -> Ids:
    """A permutation of [0, size) evaluated only at `offsets`; `keys` are (rounds, 1) or (rounds, offsets).

    A generalised Feistel network over a grid barely larger than `size`, walked until the value is inside (Black and
    Rogaway, "Ciphers with Arbitrary Finite Domains", 2002): no table, so a billion samples cost what a thousand do, and
    unlike a library's shuffle it never changes with a version.
    """
    rows = np.uint64(math.isqrt(size - 1) + 1)
    columns = np.uint64(-(-size // int(rows)))
    values = offsets.astype(np.uint64)
    keys = np.broadcast_to(keys, (len(keys), len(values)))
    outside = np.arange(len(values))
    while len(outside):
        row, column = np.divmod(values[outside], columns)
        for number, key in enumerate(keys[:, outside]):
            if number % 2:
                row = (row + _mix(column ^ key)) % rows
            else:
                column = (column + _mix(row ^ key)) % columns
        values[outside] = row * columns + column
        outside = outside[values[outside] >= np.uint64(size)]
    return values.astype(np.int64)


def _mix(values: Words) -> Words:
    """The finalizer of splitmix64 (Steele, Lea and Flood, 2014): each input bit reaches each output bit."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
