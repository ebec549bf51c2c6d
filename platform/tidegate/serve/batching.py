"""How many pictures are stepped at once: what was measured at warm-up decides. Pure.

A bucket is a number of pictures for which the network is compiled and warmed; a batch between two buckets is padded up
to the next one.
"""

from __future__ import annotations

from collections.abc import Mapping

GAIN = 0.1
"""A larger bucket is used only if a picture costs less in it by at least this part: each picture of it is done later
than it would be alone."""


def buckets(batch_max: int) -> tuple[int, ...]:
    """1, 2, 4, … and `batch_max`."""
    return (*(2**power for power in range(batch_max.bit_length()) if 2**power < batch_max), batch_max)


def paying(step_s: Mapping[int, float]) -> dict[int, float]:
    """Of the measured buckets (pictures: seconds of a step) those to use. Where one picture alone saturates the device
    that is bucket 1 and nothing else."""
    kept: dict[int, float] = {}
    for size in sorted(step_s):
        each = (seconds / pictures for pictures, seconds in kept.items())
        if size == 1 or step_s[size] / size <= (1 - GAIN) * min(each):
            kept[size] = step_s[size]
    return kept


def parts(pictures: int, step_s: Mapping[int, float]) -> tuple[int, ...]:
    """The buckets that step `pictures` pictures once in the least time, the largest first; together they hold at
    least so many."""
    best: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for count in range(1, pictures + 1):
        best.append(
            min(
                (best[max(0, count - size)][0] + seconds, (size, *best[max(0, count - size)][1]))
                for size, seconds in step_s.items()
            )
        )
    return tuple(sorted(best[pictures][1], reverse=True))


def shown_after(partials: int, steps: int) -> tuple[int, ...]:
    """After which steps a picture is shown unfinished: evenly spread, never the last step, so fewer than `partials`
    where there are too few steps."""
    spread = (round(number * steps / (partials + 1)) for number in range(1, partials + 1))
    return tuple(sorted({step for step in spread if 0 < step < steps}))
