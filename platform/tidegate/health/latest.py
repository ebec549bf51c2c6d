"""The newest reading of everything on a node, from whichever source has one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tidegate.health.readings import DCGM_S, EVENTS, PERIODS_S, Reading, Signal, Status

_FEED_PERIODS_S = {"dcgm": DCGM_S}
"""Of feeds that are slower than the signal's usual one."""


@dataclass(frozen=True, slots=True)
class Kept:
    reading: Reading
    came_s: float
    """When it came; a look that took long is not old at its end."""
    feed: str
    rank: int
    """Of its feed: a lower one goes before a higher one where both have a value."""


class Latest:
    """What people are shown and what is compared; events are not kept, they happen once."""

    def __init__(self, period_s: float) -> None:
        """`period_s`: the agent's own."""
        self._period_s = period_s
        self._kept: dict[tuple[str, Signal], Kept] = {}

    def take(self, readings: Iterable[Reading], feed: str, rank: int, now_s: float) -> list[Reading]:
        """Keep what is news; those are returned. A value that a better source also has, fresh, is none (an exporter's
        temperature is half a minute old)."""
        news = []
        for reading in readings:
            if reading.signal in EVENTS:
                news.append(reading)
                continue
            key = (reading.subject, reading.signal)
            before = self._kept.get(key)
            if before is not None and before.rank != rank and self._is_fresh(before, now_s):
                worse = before.rank < rank
                if before.reading.status is Status.OK and (worse or reading.status is not Status.OK):
                    continue
                if reading.status is not Status.OK and worse:
                    continue
            self._kept[key] = Kept(reading, now_s, feed, rank)
            news.append(reading)
        return news

    def value(self, subject: str, signal: Signal, now_s: float, silent: frozenset[str]) -> float | None:
        """The value if it is fresh and its feed is not one of the `silent`."""
        reading = self.reading(subject, signal, now_s, silent)
        return reading.value if reading is not None else None

    def reading(self, subject: str, signal: Signal, now_s: float, silent: frozenset[str]) -> Reading | None:
        """As `value`, with all that is known of it."""
        kept = self._kept.get((subject, signal))
        if kept is None or kept.feed in silent or not self._is_fresh(kept, now_s):
            return None
        return kept.reading

    def fresh(self, now_s: float, silent: frozenset[str]) -> Iterator[Reading]:
        return (kept.reading for kept in self._kept.values() if kept.feed not in silent and self._is_fresh(kept, now_s))

    def everything(self) -> list[Kept]:
        return list(self._kept.values())

    def forget(self, older_than_s: float) -> None:
        """Drop what has not been read since: a card that was taken out, an instance that is no more."""
        self._kept = {key: kept for key, kept in self._kept.items() if kept.came_s >= older_than_s}

    def _is_fresh(self, kept: Kept, now_s: float) -> bool:
        period_s = max(self._period_s, PERIODS_S.get(kept.reading.signal, 0.0), _FEED_PERIODS_S.get(kept.feed, 0.0))
        return now_s - kept.came_s <= 2.0 * period_s
