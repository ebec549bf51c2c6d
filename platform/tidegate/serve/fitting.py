"""The memory guard: what a bucket would take, said before it is tried. Pure.

Memory that a step takes grows with the tokens in it; attention without a matrix of scores grows no faster. So what was
measured for the largest bucket so far says what a larger one takes at most.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tidegate.serve.work import Size


@dataclass(slots=True)
class Room:
    """What the engine may take, and what it was seen to take."""

    limit_bytes: int | None
    """None: no limit is known, all is tried."""
    held_bytes: int = 0
    """Taken before any picture: the weights, and room that is promised to others."""
    _pixels: int = field(default=0, init=False)
    _taken_bytes: int = field(default=0, init=False)

    def measured(self, size: Size, pictures: int, taken_bytes: int) -> None:
        """`pictures` of `size` at once took so much beyond what was held."""
        pixels = size.width * size.height * pictures
        if pixels >= self._pixels:
            self._pixels, self._taken_bytes = pixels, taken_bytes

    def expected_bytes(self, size: Size, pictures: int) -> int:
        """With what is held; without a measurement no more than that is known."""
        if not self._pixels:
            return self.held_bytes
        pixels = size.width * size.height * pictures
        return self.held_bytes + self._taken_bytes * pixels // self._pixels

    def problem(self, size: Size, pictures: int) -> str | None:
        """Why so many pictures of this size don't fit; None: they do, or nothing speaks against it."""
        if self.limit_bytes is None:
            return None
        wanted = self.expected_bytes(size, pictures)
        if wanted <= self.limit_bytes:
            return None
        return f"{pictures} x {size} would take {_gib(wanted)} of memory, there are {_gib(self.limit_bytes)}"


def _gib(number: int) -> str:
    return f"{number / 2**30:.2f} GiB"
