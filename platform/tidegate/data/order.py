"""Which samples a step sees: a pure function of seed and step, so any step's samples can be listed later.

The stream of samples is one shuffled epoch after the other, cut into global batches; a batch may span two epochs.
Nothing is repeated or skipped within an epoch, and how many ranks share a batch changes nothing.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]

_ROUNDS = 8


def order(seed: int, step: int, global_batch: int, dataset_size: int) -> Ids:
    """The ids, in [0, dataset_size), of the global batch of `step` (from 0), shape (global_batch,)."""
    if dataset_size < 1 or global_batch < 1 or step < 0:
        raise ValueError(f"needs step >= 0, a batch and a data set, got {step}, {global_batch}, {dataset_size}")
    places = np.arange(step * global_batch, (step + 1) * global_batch, dtype=np.int64)
    epochs, offsets = np.divmod(places, dataset_size)
    ids = np.empty_like(places)
    for epoch in np.unique(epochs):
        inside = epochs == epoch
        ids[inside] = _shuffled(seed, int(epoch), offsets[inside], dataset_size)
    return ids


def epoch_of(step: int, global_batch: int, dataset_size: int) -> tuple[int, int]:
    """(epoch, place in it) of the first sample of `step`."""
    return divmod(step * global_batch, dataset_size)


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


def _shuffled(seed: int, epoch: int, offsets: Ids, size: int) -> Ids:
    """A permutation of [0, size) evaluated only at `offsets`.

    A generalised Feistel network over a grid barely larger than `size`, walked until the value is inside (Black and
    Rogaway, "Ciphers with Arbitrary Finite Domains", 2002): no table, so a billion samples cost what a thousand do, and
    unlike a library's shuffle it never changes with a version.
    """
    rows = np.uint64(max(1, math.isqrt(size - 1) + 1))
    columns = np.uint64(-(-size // int(rows)))
    keys = _mix(np.uint64(seed % 2**64) ^ _mix(np.arange(_ROUNDS, dtype=np.uint64) + np.uint64((epoch + 1) << 8)))
    values = offsets.astype(np.uint64)
    outside = np.arange(len(values))
    while len(outside):
        row, column = np.divmod(values[outside], columns)
        for number, key in enumerate(keys):
            if number % 2:
                row = (row + _mix(column ^ key)) % rows
            else:
                column = (column + _mix(row ^ key)) % columns
        values[outside] = row * columns + column
        outside = outside[values[outside] >= np.uint64(size)]
    return values.astype(np.int64)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64 (Steele, Lea and Flood, 2014): each input bit reaches each output bit."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
