"""How nodes are emptied of replicas for a claim, in the order that Ray forces on us. Pure.

Gateways hear it first and spill; once they follow, targets go to 0; what a replica still does when the drain's time is
over is cut off, and its gateway has it answered by a provider.
"""

from __future__ import annotations

from collections.abc import Collection

from tidegate.arbiter.claim import Claim
from tidegate.arbiter.messages import Spillway
from tidegate.arbiter.moves import Move, Route, SetTarget, StopReplicas
from tidegate.arbiter.situation import NOTHING, Moves, Situation
from tidegate.ids import NodeId

STOP_REPEAT_S = 2.0
"""Replicas that are still there after this long are cut off again."""


def close(s: Situation, claim: Claim, nodes: Collection[NodeId]) -> tuple[Move, ...]:
    """Orders that keep requests off these nodes; none where they are kept off already."""
    pools = s.pools_on(nodes)
    orders = s.book.orders
    # What a class below serving gets was idle: no overflow comes of it.
    spillway = Spillway.OPEN if pools and s.is_above_serving(claim) else orders.spillway
    closed = all(orders.allowances.get(pool) == 0 and s.book.targets.get(pool) == 0 for pool in pools)
    if closed and spillway is orders.spillway:
        return ()
    return (
        Route(
            spillway=spillway,
            allowances={**orders.allowances, **dict.fromkeys(pools, 0)},
            reason=f"{claim.spec.name} takes {len(nodes)} nodes",
            claim=claim.id,
        ),
    )


def drain(s: Situation, claim: Claim, nodes: Collection[NodeId]) -> Moves:
    """The next step that empties these nodes, whose orders are out."""
    if any(gateway.acked < claim.orders_generation for gateway in s.gateways):
        return NOTHING
    pools = [s.view.pools[name] for name in s.pools_on(nodes)]
    down = tuple(
        SetTarget(pool=pool.name, replicas=0, reason=f"drains for {claim.spec.name}", at_s=s.now_s, claim=claim.id)
        for pool in pools
        if s.book.targets.get(pool.name, pool.target) != 0
    )
    if down:
        return down, f"gateways spill; {len(down)} pools drain"
    limit_s = drain_deadline_s(s, claim)
    still = tuple(pool.name for pool in pools if pool.stopping > 0)
    began_s, stopped_s = claim.drains_since_s, claim.stopped_at_s
    if not still or began_s is None or s.now_s - began_s < limit_s:
        return NOTHING
    if stopped_s is not None and s.now_s - stopped_s < STOP_REPEAT_S:
        return NOTHING
    reason = f"the drain's {limit_s:.0f} s are over: what {len(still)} pools still do is answered elsewhere"
    return (StopReplicas(claim=claim.id, pools=still, reason=reason, at_s=s.now_s),), reason


def drain_deadline_s(s: Situation, claim: Claim) -> float:
    """Serve itself stops a replica after `serving.drain_deadline_s`, so a claim can only ask for less."""
    limit_s = s.policy.serving.drain_deadline_s
    return limit_s if claim.spec.drain_deadline_s is None else min(limit_s, claim.spec.drain_deadline_s)


def is_empty(s: Situation, node: NodeId) -> bool:
    """Whether every GPU of the node is free for a placement group."""
    seen = s.view.nodes[node]
    return seen.free_gpu_slots >= seen.gpu_slots
