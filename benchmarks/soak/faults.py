"""Which fault comes when: a script from a seed. Pure.

A script is a shuffled deck, not a throw of dice for each fault: every kind comes up as often as its share says.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    RANK_KILL = "rank_kill"
    """SIGKILL to one rank."""
    RANK_STOP = "rank_stop"
    """SIGSTOP to one rank: it lives and does nothing."""
    NODE_KILL = "node_kill"
    """SIGKILL to every process of one of the gang's nodes; a new node takes its place after a while."""
    HOT_GPU = "hot_gpu"
    """One of the gang's GPUs reads more than the limit, and cools after a while."""
    ARBITER_KILL = "arbiter_kill"
    SERVE_CONTROLLER_KILL = "serve_controller_kill"
    PROVIDER_DOWN = "provider_down"
    """Nobody listens where overflow goes."""


SHARES: Mapping[Kind, int] = {
    Kind.RANK_KILL: 9,
    Kind.RANK_STOP: 7,
    Kind.NODE_KILL: 5,
    Kind.HOT_GPU: 6,
    Kind.ARBITER_KILL: 5,
    Kind.SERVE_CONTROLLER_KILL: 4,
    Kind.PROVIDER_DOWN: 6,
}
"""How often each kind comes up in a deck."""

LASTS_S: Mapping[Kind, tuple[float, float]] = {
    Kind.NODE_KILL: (5.0, 15.0),
    Kind.HOT_GPU: (3.0, 10.0),
    Kind.PROVIDER_DOWN: (2.0, 6.0),
}
"""At least and at most, longer where the cluster takes longer to get over it; the other kinds are over at once."""

CHANGES_SIZE = frozenset({Kind.HOT_GPU})
"""After these the gang goes on with fewer ranks for a while, so rounding differs and losses are no longer the same
bit for bit. They come in the second half: the first is compared exactly."""

FIRST, LAST = 0.03, 0.92
"""Between these shares of the run faults happen: it must have begun, and the last fault must have time to heal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    number: int
    """From 1."""
    kind: Kind
    at_share: float
    """Of the run: of its minutes or of its steps, whichever comes first."""
    draw: float
    """In [0, 1): whom it hits."""
    lasts_s: float


def script(seed: int, count: int) -> tuple[Fault, ...]:
    """`count` faults in their order; the same for the same seed.

    Raises:
        ValueError: `count` is less than the number of kinds, so one of them would never come.
    """
    if count < len(Kind):
        raise ValueError(f"count must be at least {len(Kind)}, one fault of each kind; got {count}")
    dice = random.Random(seed)
    kinds = _deck(count)
    late = [kind for kind in kinds if kind in CHANGES_SIZE]
    early = [kind for kind in kinds if kind not in CHANGES_SIZE]
    dice.shuffle(early)
    first, rest = early[: count // 2], [*early[count // 2 :], *late]
    dice.shuffle(rest)
    step = (LAST - FIRST) / count
    return tuple(
        Fault(
            number=place + 1,
            kind=kind,
            at_share=FIRST + step * (place + dice.random()),
            draw=dice.random(),
            lasts_s=dice.uniform(*LASTS_S.get(kind, (0.0, 0.0))),
        )
        for place, kind in enumerate([*first, *rest])
    )


def _deck(count: int) -> list[Kind]:
    """Each kind at least once, the others by shares, the largest remainder first."""
    whole = sum(SHARES.values())
    fair = {kind: count * share / whole for kind, share in SHARES.items()}
    counts = {kind: max(1, int(amount)) for kind, amount in fair.items()}
    while (short := count - sum(counts.values())) != 0:
        sign = 1 if short > 0 else -1
        movable = [kind for kind in Kind if counts[kind] + sign >= 1]
        counts[max(movable, key=lambda kind: sign * (fair[kind] - counts[kind]))] += sign
    return [kind for kind in Kind for _ in range(counts[kind])]
