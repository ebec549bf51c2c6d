"""What differs between two checkpoints, tensor by tensor, whatever number of ranks wrote them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tidegate.checkpoint.layout import Part
from tidegate.checkpoint.manifest import Manifest, ShardSeen
from tidegate.checkpoint.reading import read_headers, read_parts, whole_shapes
from tidegate.checkpoint.tiers import Source

AT_ONCE_BYTES = 512 * 2**20
"""So much of each of the two is in memory at a time, or one tensor if that is larger."""

Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True, slots=True)
class Difference:
    tensor: str
    max_abs: float | None
    """Largest absolute difference of two numbers; NaN where only one of them is none, None where the two tensors cannot
    be compared."""
    why: str = ""
    """Why they cannot be compared, or how their types differ."""

    @property
    def same(self) -> bool:
        return self.max_abs == 0 and not self.why


def differences(
    one: tuple[Source, Manifest], other: tuple[Source, Manifest], *, at_once_bytes: int = AT_ONCE_BYTES
) -> Iterator[Difference]:
    """Every tensor of the two, by name; equal ones too. Two NaN at one place are equal.

    Raises:
        CheckpointError: a shard is not what was saved.
    """
    files, others = one[1].files, other[1].files
    ours, theirs = whole_shapes(read_headers(one[0], files)), whole_shapes(read_headers(other[0], others))
    for names in _batches(sorted(ours.keys() | theirs.keys()), ours, at_once_bytes):
        both = [name for name in names if name in theirs and name in ours and ours[name][0] == theirs[name][0]]
        left, right = _read(one[0], files, ours, both), _read(other[0], others, theirs, both)
        for name in names:
            if name not in theirs:
                yield Difference(name, None, "only in the first")
            elif name not in ours:
                yield Difference(name, None, "only in the second")
            elif name not in left:
                yield Difference(name, None, f"shape {ours[name][0]} became {theirs[name][0]}")
            else:
                types = (ours[name][1], theirs[name][1])
                why = "" if types[0] == types[1] else f"{_short(types[0])} became {_short(types[1])}"
                yield Difference(name, _max_abs(left[name], right[name]), why)


def _batches(names: Sequence[str], shapes: Shapes, at_once_bytes: int) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for name in names:
        shape, dtype = shapes.get(name, ((0,), torch.float32))
        here = math.prod(shape) * dtype.itemsize
        if batch and size + here > at_once_bytes:
            yield batch
            batch, size = [], 0
        batch.append(name)
        size += here
    if batch:
        yield batch


def _read(source: Source, files: Sequence[ShardSeen], shapes: Shapes, names: Sequence[str]) -> dict[str, Tensor]:
    parts = [
        Part(name, torch.empty(shapes[name][0], dtype=shapes[name][1]), shapes[name][0], (0,) * len(shapes[name][0]))
        for name in names
    ]
    read_parts(source, files, parts)
    return {part.name: part.local for part in parts}


def _max_abs(one: Tensor, other: Tensor) -> float:
    if not one.numel():
        return 0.0
    left, right = one.double(), other.double()
    same = (left == right) | (left.isnan() & right.isnan())
    return float(torch.where(same, 0.0, (left - right).abs()).max())


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
