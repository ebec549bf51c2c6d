"""What an engine asks of a loaded model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
from torch import Tensor

from tidegate.serve.work import Size


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """One picture. What is None is the model's own."""

    prompt: str
    seed: int
    size: Size
    steps: int | None = None
    guidance: float | None = None
    negative: str = ""


@dataclass(slots=True, kw_only=True)
class Drawing:
    """A picture at work. Tensors are one picture's, without a batch axis; N tokens, L places of text."""

    size: Size
    tokens: Tensor
    """(N, C)"""
    states: Tensor
    """(L, …)"""
    mask: Tensor
    """(L,) bool"""
    plain: tuple[Tensor, Tensor] | None
    """States and mask of what it is led away from; None = not guided."""
    guidance: float
    at: Tensor
    """(steps,) of float32: the times as the network is told them."""
    leap: Tensor
    """(steps,) of float32: how far each step goes, below zero."""
    clean: Tensor | None = None
    """(N, C): what the newest step took for the finished picture."""
    done: int = 0

    @property
    def steps(self) -> int:
        return len(self.at)

    @property
    def kind(self) -> tuple[Size, bool]:
        """Drawings of one kind can be stepped together, at whatever step each is."""
        return self.size, self.plain is not None


@runtime_checkable
class Stepped(Protocol):
    """Pictures can be stepped together, come and go between two steps."""

    sizes: tuple[Size, ...]
    """What it makes; the first is its own."""

    def begin(self, wish: Wish) -> Drawing: ...

    def step(self, drawings: Sequence[Drawing], bucket: int) -> None:
        """One step of each, all of one kind, as a batch of `bucket` rows."""
        ...

    def picture(self, drawing: Drawing, *, unfinished: bool = False) -> np.ndarray:
        """uint8 (H, W) or (H, W, 3); of what it will be like by the newest step if `unfinished`."""
        ...


class Whole(Protocol):
    """A request's pictures are made by one call, together."""

    sizes: tuple[Size, ...]
    """As `Stepped.sizes`."""

    def paint(self, wishes: Sequence[Wish], after: After) -> np.ndarray:
        """uint8 (B, H, W, C), of wishes that differ in seed alone. Calls `after` once before and after each step but
        the last; what it raises ends the work."""
        ...


After: TypeAlias = Callable[[int, int, Callable[[], np.ndarray] | None], None]
"""`after(done, steps, unfinished)`; `unfinished()` gives all pictures as they are, None where that can't be had."""

Painter: TypeAlias = Stepped | Whole
