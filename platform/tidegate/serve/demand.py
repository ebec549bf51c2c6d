"""What replicas here have made in the last minute: the part of the traffic that would overflow if they left. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

WINDOW_S = 60.0


@dataclass(frozen=True, slots=True)
class Rate:
    images_per_s: float
    busy_replicas: float
    """GPU-seconds per second."""


@dataclass(slots=True)
class Demand:
    """Counts in buckets of a second, so that its size does not depend on the traffic.

    `began_at_s`: since when it counts; one that is younger than the window divides by its age.
    """

    began_at_s: float
    _buckets: deque[tuple[int, int, float]] = field(init=False, default_factory=deque)
    """Second, images, GPU-seconds."""

    def made(self, now_s: float, images: int, compute_s: float) -> None:
        second = int(now_s)
        if self._buckets and self._buckets[-1][0] == second:
            _, before, before_s = self._buckets.pop()
            images, compute_s = before + images, before_s + compute_s
        self._buckets.append((second, images, compute_s))
        self._forget(now_s)

    def rate(self, now_s: float) -> Rate:
        self._forget(now_s)
        over_s = min(WINDOW_S, max(1.0, now_s - self.began_at_s))
        return Rate(
            images_per_s=sum(images for _, images, _ in self._buckets) / over_s,
            busy_replicas=sum(compute_s for _, _, compute_s in self._buckets) / over_s,
        )

    def _forget(self, now_s: float) -> None:
        while self._buckets and self._buckets[0][0] <= now_s - WINDOW_S:
            self._buckets.popleft()
