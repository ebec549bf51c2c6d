"""What a counter rose by. It starts at the first value seen, may be reset at any time, and is blind at its ceiling."""

from __future__ import annotations

from tidegate.health.history import Count
from tidegate.health.readings import CEILINGS, Reading

_MOST_RISES = 512


def counted(count: Count | None, reading: Reading, value: float, gap_s: float, longest_s: float) -> tuple[Count, bool]:
    """What is known of the counter after one more value, and whether what it rose by can be told.

    `gap_s`: the longest rest after which a value still follows the one before. `longest_s`: so far back is counted.
    """
    if count is None:
        return Count(reading.at_s, value), False
    if reading.at_s == count.at_s:
        return count, False
    rises = tuple(rise for rise in count.risen if 0 <= reading.at_s - rise[0] < longest_s)
    if not 0 < reading.at_s - count.at_s <= gap_s:
        # Over a gap it may have been reset, or have risen at any time: it is a new beginning.
        return Count(reading.at_s, value, rises), False
    # One that went down was reset, and has come so far since.
    delta = value - count.value if value >= count.value else value
    if delta:
        rises = (*rises, (reading.at_s, delta))[-_MOST_RISES:]
    # At its ceiling it is blind: what rose up to there counts, standing still there says nothing.
    blind = value >= CEILINGS.get(reading.signal, float("inf")) and delta == 0
    return Count(reading.at_s, value, rises), not blind


def risen(count: Count, now_s: float, within_s: float) -> float:
    return sum(delta for at_s, delta in count.risen if now_s - at_s < within_s)
