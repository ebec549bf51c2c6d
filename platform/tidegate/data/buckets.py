"""Which sizes images are brought to, and which image goes to which: buckets by aspect ratio. Pure.

All images of a bucket have one size, so a batch has one shape; the buckets of a resolution have about the same number
of pixels, so all batches cost about the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tidegate.errors import DataError


@dataclass(frozen=True, slots=True, order=True)
class Size:
    width: int
    height: int

    def __str__(self) -> str:
        return f"{self.width}x{self.height}"

    @property
    def aspect(self) -> float:
        """Width over height."""
        return self.width / self.height


def sizes(resolution: int, *, multiple: int, aspect_max: float) -> tuple[Size, ...]:
    """One size for each width that is a multiple of `multiple`: the highest of at most resolution² pixels, no side more
    than `aspect_max` times the other. `aspect_max` 1 gives the square alone.

    Raises:
        DataError: no size fits.
    """
    if multiple < 1 or aspect_max < 1 or resolution < multiple:
        raise DataError(
            f"resolution {resolution}, multiple {multiple}, aspect {aspect_max:g}: no size fits\n"
            "hint: a resolution of at least the multiple, and an aspect limit of at least 1"
        )
    found = []
    for width in range(multiple, math.floor(resolution * math.sqrt(aspect_max)) + 1, multiple):
        size = Size(width, resolution**2 // width // multiple * multiple)
        if size.height and _elongation(size) <= aspect_max:
            found.append(size)
    side = resolution // multiple * multiple
    return tuple(sorted({*found, Size(side, side)}) if aspect_max > 1 else (Size(side, side),))


def nearest(image: Size, among: Iterable[Size]) -> Size:
    """The size whose aspect ratio is nearest in proportion (so 1:2 is as far from 1:1 as 2:1); of equals the larger."""
    return min(among, key=lambda size: (abs(math.log(size.aspect / image.aspect)), -size.width * size.height, size))


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What an image must be to be used."""

    sizes: tuple[Size, ...] = ()
    """The buckets; with none, images keep the sizes they have, each size being a bucket."""
    side_min: int = 1
    """Pixels of the shorter side."""
    aspect_max: float = math.inf
    """Longer side over shorter side."""


def bucket(image: Size, caption: str, limits: Limits) -> tuple[Size | None, str]:
    """(the size an image is brought to, ""), or (None, why it is not used)."""
    if not caption.strip():
        return None, "empty caption"
    if min(image.width, image.height) < limits.side_min:
        return None, f"too small: {image}, the shorter side must be at least {limits.side_min}"
    if _elongation(image) > limits.aspect_max:
        return None, f"too long: {image}, one side may be {limits.aspect_max:g} times the other"
    return (nearest(image, limits.sizes) if limits.sizes else image), ""


def cut(rows: int, rows_per_shard: int) -> Sequence[range]:
    """The rows of each shard of a bucket."""
    return [range(start, min(start + rows_per_shard, rows)) for start in range(0, rows, rows_per_shard)]


def block_rows(mean_row_bytes: float, block_bytes: int = 16 << 20) -> int:
    """Rows of a block of about `block_bytes`, a power of two: what a reader holds at a time, and shuffles within."""
    return 1 << max(4, min(20, round(math.log2(block_bytes / max(1.0, mean_row_bytes)))))


def _elongation(size: Size) -> float:
    return max(size.aspect, 1 / size.aspect)
