"""Which GPUs do far less than their peers. Pure.

One GPU of eight was seen to do a third of its peers' work while the vendor's diagnostics passed (C048). No table of
what each model should reach is needed: the peers are the table.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from tidegate.ids import GpuId

FEWEST_PEERS = 3
"""With fewer than these at work nobody can say which of them is the odd one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    gpu: GpuId
    work: float
    """In the unit of what was given, e.g. GFLOP/s."""
    ratio: float
    """To the median of all."""


def stragglers(work: Mapping[GpuId, float], below_ratio: float = 0.7) -> tuple[Straggler, ...]:
    """GPUs whose work is less than `below_ratio` of the median, the slowest first.

    `work` is what each GPU of one kind did in the same test or the same steps; the more the better.

    Raises:
        ValueError: `below_ratio` is not between 0 and 1, or an amount is negative.
    """
    if not 0 < below_ratio < 1:
        raise ValueError(f"below_ratio must lie between 0 and 1, got {below_ratio}")
    negative = [gpu for gpu, amount in work.items() if amount < 0]
    if negative:
        raise ValueError(f"work must not be negative; it is for {negative[0]}")
    if len(work) < FEWEST_PEERS:
        return ()
    median = statistics.median(work.values())
    if median == 0:
        return ()
    slow = [Straggler(gpu=gpu, work=amount, ratio=amount / median) for gpu, amount in work.items()]
    return tuple(sorted((s for s in slow if s.ratio < below_ratio), key=lambda s: (s.ratio, s.gpu)))
