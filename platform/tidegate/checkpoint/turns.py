"""Which checkpoint is due, and which copy in memory it may use. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Due:
    memory: bool
    disk: bool

    def __bool__(self) -> bool:
        return self.memory or self.disk


def due(step: int, *, every_steps: int, ram_every_steps: int | None) -> Due:
    """What `step` ends with. All that goes to disk is in memory too, where there is a copy in memory at all."""
    disk = step % every_steps == 0
    return Due(memory=ram_every_steps is not None and (disk or step % ram_every_steps == 0), disk=disk)


def next_slot(good: int | None, writing: int | None) -> int:
    """Which of the two copies to change: not the one that is being written to disk, which is whole in memory as well;
    else not the last good one (None: neither is)."""
    if writing is not None:
        return 1 - writing
    return 1 - good if good is not None else 0


def young_daly_s(save_s: float, between_failures_s: float) -> float:
    """The interval between saves that loses least time to saves and to what has to be done again after failures.

    √(2·δ·M) for a save that costs δ and a mean time M between failures (Young, 1974), with Daly's (2006) next terms:
    √(2δM)·(1 + ⅓·√(δ/2M) + δ/18M) − δ while δ < 2M, and M beyond.
    """
    if save_s < 0 or between_failures_s <= 0:
        raise ValueError(f"save_s {save_s} and between_failures_s {between_failures_s} must be positive")
    if save_s >= 2 * between_failures_s:
        return between_failures_s
    ratio = save_s / (2 * between_failures_s)
    return math.sqrt(2 * save_s * between_failures_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s
