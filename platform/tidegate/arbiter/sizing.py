"""How many replicas the load asks for. Pure.

Up at once, down by the highest need of a whole window: a target that was lowered stays for at least that window unless
the load itself comes back, so it cannot swing. The last replica has a window of its own, since a cold start costs more
than one replica among others.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from tidegate.arbiter.messages import GatewayReport
from tidegate.spec.policy import SizingSpec


def need(gateways: Iterable[GatewayReport], running: int, utilisation: float) -> int:
    """Replicas that the present load asks for, at so much work for each.

    `gateways`: those that report. Each busy replica counts, and each request that has none: one that waits, and one
    that a provider has.
    """
    reports = tuple(gateways)
    at_work = min(running, sum(pool.ongoing for gateway in reports for pool in gateway.pools))
    busy = max(float(at_work), sum(gateway.local_busy_replicas for gateway in reports))
    without = sum(g.waiting + sum(provider.ongoing for provider in g.providers) for g in reports)
    return math.ceil(busy / utilisation - 1e-6) + without


@dataclass(slots=True)
class LoadWatch:
    """The highest need of each second, for as long as a window may look back."""

    keep_s: float
    _seconds: deque[tuple[int, int]] = field(init=False, default_factory=deque)
    """Falling needs: one that is not above a later one can never again be the highest of a window."""

    def observe(self, now_s: float, need: int) -> None:
        while self._seconds and self._seconds[-1][1] <= need:
            self._seconds.pop()
        self._seconds.append((math.floor(now_s), need))
        while self._seconds[0][0] < now_s - self.keep_s - 1:
            self._seconds.popleft()

    def highest(self, now_s: float, window_s: float) -> int:
        """Over the last `window_s`; 0 where nothing was observed."""
        return next((need for at_s, need in self._seconds if at_s + 1 > now_s - window_s), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a look back shows; see `SizingSpec` for the two windows."""

    highest: int
    highest_to_zero: int
    watched_s: float
    """For how long needs have been observed: what lies before is unknown, and unknown is not idle."""


def replicas_for(load: Load, spec: SizingSpec, current: int) -> int:
    """How many there should be, of `current` that are meant to be there now."""
    want = max(spec.replicas_min, load.highest)
    if want == 0 and (load.highest_to_zero > 0 or load.watched_s < spec.to_zero_after_s):
        want = min(current, 1)
    return max(want, current) if load.watched_s < spec.down_after_s else want
