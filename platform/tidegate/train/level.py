"""Has the loss moved to a higher level and stayed there? Pure.

A small bump that never quite recovers is far below what the spike guard sees, and ruins a run all the same. So losses
are gathered in windows, and when the means of two in a row are above that of the one before them, it has stayed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tidegate.train.config import GuardSpec

AFTER_RESUME_STEPS = 10
_JUMP = 1.25
"""Something was not restored where a loss jumps from 0.14 to 0.21 (C087); batches differ by less."""


@dataclass(frozen=True, slots=True)
class Window:
    """Losses of some steps in a row, as sums."""

    ends: int = 0
    """Steps done after its last one."""
    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of squared distances from the mean (Welford's)."""

    def with_loss(self, step: int, loss: float) -> Window:
        count = self.count + 1
        mean = self.mean + (loss - self.mean) / count
        return Window(step, count, mean, self.squares + (loss - self.mean) * (loss - mean))

    @property
    def error_squared(self) -> float:
        """Of the mean."""
        return self.squares / (self.count - 1) / self.count if self.count > 1 else math.inf


@dataclass(frozen=True, slots=True)
class Shift:
    reason: str
    before_step: int
    """The loss was still at its old level when so many steps were done."""


@dataclass(frozen=True, slots=True)
class Level:
    """What is remembered."""

    open: Window = Window()
    full: tuple[Window, ...] = ()
    """At most two, the older first."""


def watch(level: Level, spec: GuardSpec, step: int, loss: float) -> tuple[Level, Shift | None]:
    """After `step` steps, the last with `loss`, which is finite."""
    if spec.level_window_steps is None:
        return level, None
    window = level.open.with_loss(step, loss)
    if window.count < spec.level_window_steps:
        return replace(level, open=window), None
    full = (*level.full, window)
    if len(full) < 3:
        return Level(full=full), None
    before, between, after = full
    if min(_rise(before, between), rise := _rise(before, after)) <= spec.level_sigmas:
        return Level(full=full[1:]), None
    reason = (
        f"the loss stays higher: {after.mean:.4g} over {after.count} steps, was {before.mean:.4g} up to step "
        f"{before.ends}, {rise:.1f} standard errors"
    )
    return Level(), Shift(reason, before.ends)  # told once: what is usual is learnt anew


def jumped(usual: float, first: Sequence[float]) -> str | None:
    """Why a run that has resumed does not go on where it was: its `first` losses are well above the `usual` one from
    before. None where they are as they should be."""
    mean = sum(first) / len(first)
    if mean <= _JUMP * usual:
        return None
    return f"the first {len(first)} losses after resuming are {mean:.4g} in the mean, before it was {usual:.4g}"


def _rise(before: Window, after: Window) -> float:
    """In standard errors of the difference of two means."""
    error = math.sqrt(before.error_squared + after.error_squared)
    difference = after.mean - before.mean
    return difference / error if error else math.copysign(math.inf, difference) if difference else 0.0
