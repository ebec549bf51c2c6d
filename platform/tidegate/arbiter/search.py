"""What a claim may have now, by its class: serving's floor, idle replicas, nodes that rest after a flip. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from tidegate.arbiter.claim import Claim
from tidegate.arbiter.placement import Placement, place
from tidegate.arbiter.situation import Situation
from tidegate.ids import ClaimId, NodeId, pool_name

ALL = 10**9


def search(
    s: Situation,
    claim: Claim,
    *,
    taking_from: Collection[ClaimId] = (),
    keep: Sequence[NodeId] = (),
    may_move_serving: bool = True,
) -> Placement | None:
    """The claim's nodes if it were placed now, or None.

    A class above `serving` may move any replica but those of the floor. One below gets what replicas have left idle
    over the last minute, and one busy replica more than that stays (C031).
    """
    floor = s.policy.serving.floor_replicas
    if not s.is_above_serving(claim):
        # Where nobody says how busy serving is, it needs all that it has.
        floor = ALL if s.busy_replicas is None else max(floor, math.ceil(s.busy_replicas) + 1)
    return place(
        s.view,
        s.book,
        claim.spec,
        may_move_serving,
        taking_from=taking_from,
        keep=keep,
        barred=resting(s, claim),
        floor_replicas=floor,
        now_s=s.now_s,
    )


def resting(s: Situation, claim: Claim) -> frozenset[NodeId]:
    """Nodes that came home just now and stay there: a claim that has waited for the dwell time itself gets them.

    However often claims are filed and released, serving's replicas on a node then move at most once in that time.
    """
    dwell_s = s.policy.claims.dwell_s
    if s.now_s - claim.filed_at_s >= dwell_s:
        return frozenset()
    return frozenset(
        node
        for node, at_s in s.book.released_at_s.items()
        if s.now_s - at_s < dwell_s and pool_name(node) in s.view.pools
    )
