"""What the clients of the load test ask for, and when: an endless row of asks from a seed. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    SOUND = "sound"
    """One picture, please."""
    CANCELLED = "cancelled"
    """The same, and the client leaves before or just as it is answered."""
    BIG_BODY = "big_body"
    """More bytes than are ever read."""
    BIG_PICTURE = "big_picture"
    """A size that nobody makes."""


SHARES: Mapping[Kind, float] = {Kind.SOUND: 0.82, Kind.CANCELLED: 0.12, Kind.BIG_BODY: 0.03, Kind.BIG_PICTURE: 0.03}

PATIENCE_S = (0.0, 0.4)
"""Of a client that leaves: at least and at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    number: int
    """From 1."""
    at_s: float
    """Since the first could have come."""
    kind: Kind
    leaves_after_s: float | None = None
    """`cancelled` only."""


def asks(seed: int, rate_per_s: float, shares: Mapping[Kind, float] = SHARES) -> Iterator[Ask]:
    """A Poisson stream: whether the one before was answered makes no difference (an open loop)."""
    dice = random.Random(seed)
    at_s, number = 0.0, 0
    while True:
        number += 1
        at_s += dice.expovariate(rate_per_s)
        (kind,) = dice.choices(list(shares), weights=list(shares.values()))
        leaves = dice.uniform(*PATIENCE_S) if kind is Kind.CANCELLED else None
        yield Ask(number=number, at_s=at_s, kind=kind, leaves_after_s=leaves)
