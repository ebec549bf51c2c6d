"""A rank's share of a batch, cut into what it computes at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from tidegate.data.loader import Batch
from tidegate.data.order import share_range


def how_many(global_batch: int, data_size: int, micro_batch: int | None) -> int:
    """Pieces of every rank's share: the same number on all ranks, since each is a round of collectives."""
    largest = -(-global_batch // data_size)
    return -(-largest // micro_batch) if micro_batch is not None else 1


def pieces(batch: Batch, count: int) -> Iterator[tuple[Batch, bool]]:
    """(piece, whether it counts): a share too short for `count` pieces is filled with one that counts for nothing."""
    if count == 1:
        yield batch, True
        return
    size = len(batch.ids)
    for number in range(count):
        part = share_range(size, number, count)
        yield _cut(batch, part if len(part) else range(1)), len(part) > 0


def _cut(batch: Batch, part: range) -> Batch:
    """What there is one of for each sample is cut; the rest holds for all."""
    values = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    size = len(batch.ids)
    cut = {
        name: value[part.start : part.stop]
        for name, value in values.items()
        if hasattr(value, "__getitem__") and len(value) == size
    }
    return dataclasses.replace(batch, **cut)
