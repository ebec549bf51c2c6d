"""What a rule has to go by: the reading itself, what is known around it, and what that makes of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from tidegate.health.readings import Reading, Signal


class Seen(Enum):
    """What one reading is to one rule."""

    BAD = "bad"
    BETWEEN = "between"
    """Not bad, and not good enough to lift a verdict either."""
    GOOD = "good"
    NOTHING = "nothing"
    """No evidence at all: missing, refused, implausible. It neither adds to a verdict nor lifts one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Around:
    """What is known beside the reading itself, when it is judged."""

    other: Callable[[Signal], float | None]
    """The newest fresh value of another signal of the same subject."""
    risen: Callable[[float], float | None]
    """Of a counter: by how much it rose within so many seconds; None before there is anything to compare with."""
    peers: Callable[[], Peers | None]
    """The same signal of the others that do the same work; None when they are too few to say who is odd."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """Of one signal among the GPUs of a gang (or a node) that are at work."""

    count: int
    median: float
    mad: float
    """Median of the absolute deviations from the median."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """A bad reading counts only while another signal of the same subject is known to be within these bounds."""

    signal: Signal
    at_least: float = -math.inf
    at_most: float = math.inf

    def holds(self, around: Around) -> bool:
        value = around.other(self.signal)
        return value is not None and self.at_least <= value <= self.at_most

    def __str__(self) -> str:
        if self.at_least == self.at_most:
            return f"`{self.signal}` = {self.at_least:g}"
        return f"`{self.signal}` " + (f"≥ {self.at_least:g}" if self.at_most == math.inf else f"≤ {self.at_most:g}")


def number_in(reading: Reading) -> str:
    return f"{reading.value:g}" if reading.value is not None else str(reading.status)
