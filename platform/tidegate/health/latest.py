"""The newest reading of everything on a node, from whichever source has one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tidegate.health.readings import DCGM_S, EVENTS, PERIODS_S, SLOW_S, Reading, Signal, Status

_FEED_PERIODS_S = {"dcgm": DCGM_S}
"""Of feeds that are slower than the signal's usual one."""


class Kept(NamedTuple):
    reading: Reading
    came_s: float
    """When it came; a look that took long is not old at its end."""
    feed: str
    rank: int
    """Of its feed: a lower one goes before a higher one where both have a value."""
    fresh_s: float
    """So long after it came it is fresh."""


class Latest:
    """What people are shown and what is compared; events are not kept, they happen once."""

    def __init__(self, period_s: float) -> None:
        """`period_s`: the agent's own."""
        self._period_s = period_s
        self._kept: dict[tuple[str, Signal], Kept] = {}
        self._fresh_s: dict[tuple[str, Signal, Status], float] = {}

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
            if before is not None and before.rank != rank and now_s - before.came_s <= before.fresh_s:
                worse = before.rank < rank
                if before.reading.status is Status.OK and (worse or reading.status is not Status.OK):
                    continue
                if reading.status is not Status.OK and worse:
                    continue
            self._kept[key] = Kept(reading, now_s, feed, rank, self._fresh_for(feed, reading.signal, reading.status))
            news.append(reading)
        return news

    def value(self, subject: str, signal: Signal, now_s: float, silent: frozenset[str]) -> float | None:
        """The value if it is fresh and its feed is not one of the `silent`."""
        reading = self.reading(subject, signal, now_s, silent)
        return reading.value if reading is not None else None

    def reading(self, subject: str, signal: Signal, now_s: float, silent: frozenset[str]) -> Reading | None:
        """As `value`, with all that is known of it."""
        kept = self._kept.get((subject, signal))
        if kept is None or kept.feed in silent or now_s - kept.came_s > kept.fresh_s:
            return None
        return kept.reading

    def fresh(self, now_s: float, silent: frozenset[str]) -> Iterator[Reading]:
        return (
            kept.reading
            for kept in self._kept.values()
            if kept.feed not in silent and now_s - kept.came_s <= kept.fresh_s
        )

    def everything(self) -> list[Kept]:
        return list(self._kept.values())

    def forget(self, older_than_s: float) -> None:
        """Drop what has not been read since: a card that was taken out, an instance that is no more."""
        self._kept = {key: kept for key, kept in self._kept.items() if kept.came_s >= older_than_s}

    def _fresh_for(self, feed: str, signal: Signal, status: Status) -> float:
        key = (feed, signal, status)
        if key not in self._fresh_s:
            periods_s = [self._period_s, PERIODS_S.get(signal, 0.0), _FEED_PERIODS_S.get(feed, 0.0)]
            # What a card does not have is not said at each look.
            periods_s += [SLOW_S] if status is Status.UNSUPPORTED else []
            self._fresh_s[key] = 2.0 * max(periods_s)
        return self._fresh_s[key]
