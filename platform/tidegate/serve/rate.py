"""How many requests in a time, as one number: the generic cell rate algorithm (ITU-T I.371, virtual scheduling). Pure.

The libraries for it read the clock themselves; here the time is an argument, as everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rate:
    per_min: int
    """So many at once, and evenly as many a minute."""

    @property
    def spacing_s(self) -> float:
        return 60.0 / self.per_min


def take(due_s: float, rate: Rate, now_s: float) -> tuple[float, float]:
    """Ask for one. `due_s` is when all that was taken so far would have been spread evenly; 0 to begin with.

    Returns the new `due_s` and 0; or the old one and how many seconds to wait.
    """
    if not due_s - now_s <= 60.0 + rate.spacing_s:
        due_s = now_s  # the clock was set back: nobody waits for longer than the rule could ever ask
    later_s = max(due_s, now_s) + rate.spacing_s
    # A rounding error of the clock's own size must not cost the last of a burst.
    wait_s = later_s - now_s - 60.0
    return (later_s, 0.0) if wait_s <= 1e-6 else (due_s, wait_s)
