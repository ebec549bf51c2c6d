"""Who is the odd one: a value against those of the others that do the same work (specification 4.4)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tidegate.health.evidence import Around, Peers, Seen, number_in
from tidegate.health.readings import Reading
from tidegate.health.values import value_of

FEWEST_PEERS = 3
"""With fewer than these at work nobody can say which of them is the odd one."""
ENOUGH_FOR_MAD = 4
Z_LIMIT = 3.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Among:
    """Bad when far from the median of its peers: below `limit` times it, or above if `limit` is above 1.

    Among four or more, also by the robust z (0.6745 (x - m) / MAD, the MAD at least 1 % of m): > 3.5 (reference 4.4).
    """

    limit: float
    least_median: float
    """With less than that in the middle, the peers themselves do nothing, and nobody is odd."""
    calm: tuple[float, float] | None = None

    def seen(self, reading: Reading, around: Around) -> Seen:
        value, peers = value_of(reading), around.peers()
        if value is None or peers is None or peers.median < self.least_median or peers.median <= 0:
            return Seen.NOTHING
        ratio = value / peers.median
        far = ratio < self.limit if self.limit < 1 else ratio > self.limit
        z = 0.6745 * abs(value - peers.median) / max(peers.mad, 0.01 * peers.median)
        if far and (peers.count < ENOUGH_FOR_MAD or z > Z_LIMIT):
            return Seen.BAD
        return Seen.BETWEEN if far else Seen.GOOD

    def evidence(self, reading: Reading, around: Around) -> str:
        peers = around.peers()
        median = math.nan if peers is None else peers.median
        share = (reading.value or 0) / median
        of_peers = f"{share:.2f} of its peers' median {median:.4g}"
        return f"{reading.signal} {number_in(reading)}, {of_peers}, limit {self.limit:g}"

    def __str__(self) -> str:
        return f"{'<' if self.limit < 1 else '>'} {self.limit:g} × median of its peers"


def peers_of(values: Sequence[float]) -> Peers | None:
    """None when they are too few."""
    if len(values) < FEWEST_PEERS:
        return None
    median = statistics.median(values)
    return Peers(count=len(values), median=median, mad=statistics.median(abs(value - median) for value in values))
