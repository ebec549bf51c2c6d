"""A fleet of any size at rest: pools on every node, claims in every state, some GPUs in quarantine.

Everything in it is as the cluster and the rooms would show it at one moment, so `decide` finds nothing to do until
another claim is filed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tidegate.arbiter.book import Book, Quarantine, apply
from tidegate.arbiter.claim import Claim
from tidegate.arbiter.decide import decide
from tidegate.arbiter.messages import (
    Action,
    ClaimSpec,
    GangPhase,
    GangReport,
    GatewayReport,
    GpuSeen,
    Grant,
    GrantedNode,
    HealthReport,
    Orders,
    Spillway,
    Verdict,
    When,
)
from tidegate.arbiter.moves import File, Hold, hold_of
from tidegate.arbiter.states import HOLDING, ClaimState
from tidegate.arbiter.view import GroupState, NodeSeen, PoolSeen, View
from tidegate.ids import ClaimId, GatewayId, Generation, GpuId, NodeId, PoolName, Tier, pool_name
from tidegate.spec.policy import Policy, ServingSpec

GPUS_PER_NODE = 8
NODES_PER_RACK = 32
CLAIMS_PER_STATE = 4
NOW_S = 1_000_000.0
SHARES: Mapping[ClaimState, float] = {
    ClaimState.QUEUED: 0.0,
    ClaimState.PROVING: 0.0,
    ClaimState.DRAINING: 0.01,
    ClaimState.GRANTED: 0.01,
    ClaimState.RUNNING: 0.06,
    ClaimState.PREEMPTED: 0.01,
    ClaimState.RETURNING: 0.01,
    ClaimState.DONE: 0.01,
    ClaimState.UNDONE: 0.0,
}
"""Part of the fleet's nodes that each claim in a state names."""
BIG_SHARE = 0.3
"""Part of the fleet's GPUs that the claim asks for which the placing tick places."""
HOT_EVERY, LOST_EVERY = 100, 300
"""Every so many nodes one has a GPU that may only serve, or may do nothing."""
POLICY = Policy(serving=ServingSpec(protect=False, floor_replicas=8))
SETTLE_TICKS = 50
PLACED = (*HOLDING, ClaimState.RETURNING, ClaimState.DONE)
WITH_GANG = frozenset({ClaimState.GRANTED, ClaimState.RUNNING, ClaimState.PREEMPTED})
RAN = frozenset({ClaimState.RUNNING, ClaimState.PREEMPTED, ClaimState.RETURNING, ClaimState.DONE})


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """What one `decide` is asked about."""

    book: Book
    view: View
    big: ClaimSpec

    def look(self) -> View:
        """The view as a new look at the cluster would give it: nothing that an earlier decision derived from it."""
        return replace(self.view)

    def asked(self) -> Book:
        """The book just after the big claim was filed."""
        return apply(self.book, File(claim=ClaimId(self.big.name), spec=self.big, at_s=NOW_S))


def build(nodes: int) -> Fleet:
    """A fleet of `nodes` × `GPUS_PER_NODE` GPUs for which `decide` has nothing to do.

    Raises:
        RuntimeError: it does not come to rest, so this file no longer describes what a cluster at rest looks like.
    """
    if missing := set(ClaimState) - set(SHARES):
        raise RuntimeError(f"no share of the nodes for claims in {sorted(missing)}\nhint: add them to SHARES")
    ids = [NodeId(f"{index:012x}".ljust(56, "0")) for index in range(nodes)]
    verdicts = _verdicts(ids)
    claims = _claims(ids, verdicts)
    closed = {node for claim in claims.values() if claim.state in HOLDING for node in claim.nodes}
    coming = {node for claim in claims.values() if claim.state is ClaimState.RETURNING for node in claim.nodes}
    pools = {pool_name(node): _pool(node, verdicts, away=node in closed or node in coming) for node in ids}
    view = View(
        nodes={node: _node(index, node, pools) for index, node in enumerate(ids)},
        pools=pools,
        groups={
            claim.id: GroupState.PENDING if claim.state is ClaimState.DRAINING else GroupState.READY
            for claim in claims.values()
            if claim.state in HOLDING
        },
        gateways={
            (name := GatewayId(f"gateway-{number}")): GatewayReport(gateway=name, at_s=NOW_S, acked=Generation(10**9))
            for number in range(8)
        },
        health={node: _health(node, verdicts) for node in ids},
        gangs={claim.id: gang for claim in claims.values() if (gang := _gang(claim)) is not None},
    )
    book = Book(
        claims=claims,
        orders=Orders(generation=Generation(1), spillway=Spillway.OPEN, allowances=_targets(pools)),
        targets=_targets(pools),
        quarantines={hold: Quarantine(verdict=verdict, since_s=NOW_S - 60.0) for hold, verdict in verdicts.items()},
        generation=Generation(1),
    )
    most = round(nodes * BIG_SHARE) * GPUS_PER_NODE
    return Fleet(book=_settled(book, view), view=view, big=_spec("big", most, most // 2, order=2))


def _settled(book: Book, view: View) -> Book:
    for _ in range(SETTLE_TICKS):
        decision = decide(book, view, POLICY, NOW_S)
        if not decision.moves:
            return book
        for move in decision.moves:
            book = apply(book, move)
    raise RuntimeError(f"the fleet does not come to rest: {decision.reason[:500]}")


def _spec(name: str, most: int, least: int, order: int = 0) -> ClaimSpec:
    return ClaimSpec(
        name=name, claim_class="pretrain", order=order, max_gpus=most, min_gpus=least, owner="bench", deadline_s=3600.0
    )


def _verdicts(ids: list[NodeId]) -> dict[Hold, Verdict]:
    found = {}
    for index, node in enumerate(ids):
        for every, gpu, rule, tier in ((HOT_EVERY, 3, "temperature", Tier.SERVE), (LOST_EVERY, 5, "xid", Tier.NONE)):
            if index % every == every // 2:
                verdict = Verdict(
                    at_s=NOW_S - 60.0,
                    node=node,
                    gpu=_gpu(node, gpu),
                    rule=rule,
                    action=Action.EVICT_GPU,
                    when=When.NOW,
                    tier=tier,
                    evidence=f"{rule} of GPU {gpu}",
                    ends="pardon",
                )
                found[hold_of(verdict)] = verdict
    return found


def _claims(ids: list[NodeId], verdicts: Mapping[Hold, Verdict]) -> dict[ClaimId, Claim]:
    claims = {}
    left = iter(ids)
    out = {gpu for _, gpu, _ in verdicts}
    for state in ClaimState:
        for number in range(CLAIMS_PER_STATE):
            nodes = tuple(next(left) for _ in range(round(len(ids) * SHARES[state])))
            held = max(1, len(nodes)) * GPUS_PER_NODE
            # One that waits asks for more than can be had while the others hold theirs: the search goes to its end.
            most = len(ids) * GPUS_PER_NODE if state is ClaimState.QUEUED else held
            claim = ClaimId(f"{state}-{number}")
            grant = Grant(
                claim=claim,
                generation=Generation(1),
                placement_group=f"tidegate-{claim}-1",
                gpus_per_node=GPUS_PER_NODE,
                nodes=tuple(
                    GrantedNode(node=node, address=_address(node), gpus=tuple(g for g in _gpus(node) if g not in out))
                    for node in nodes
                ),
            )
            asks_in_vain = state is ClaimState.QUEUED
            spec = _spec(claim, most, most if asks_in_vain else 1, order=int(asks_in_vain))
            # Some leave on notice: whether they must is searched for as well.
            weak = state in WITH_GANG and number == 0
            claims[claim] = Claim(
                id=claim,
                spec=replace(spec, claim_class="scavenger") if weak else spec,
                filed_at_s=NOW_S - 600.0 + number,
                state=state,
                since_s=NOW_S - 1.0,
                nodes=nodes,
                attempt=int(state in PLACED),
                turn_at_s=NOW_S - 1.0 if state in (ClaimState.PROVING, ClaimState.DRAINING) else None,
                canary=f"{claim}/1" if state is ClaimState.PROVING else None,
                canary_at_s=NOW_S,
                orders_generation=Generation(1),
                drains_since_s=NOW_S - 1.0 if state is ClaimState.DRAINING else None,
                grant=grant if state in WITH_GANG else None,
                ever_ran=state in RAN,
                runs_since_s=NOW_S - 1.0 if state in RAN else None,
                leave_by_s=NOW_S + 30.0 if state is ClaimState.PREEMPTED else None,
            )
    return claims


def _gang(claim: Claim) -> GangReport | None:
    if claim.grant is None:
        return None
    gpus = tuple(gpu for node in claim.grant.nodes for gpu in node.gpus)
    running = claim.state is not ClaimState.GRANTED
    return GangReport(
        claim=claim.id,
        at_s=NOW_S,
        phase=GangPhase.RUNNING if running else GangPhase.FORMING,
        gang_generation=Generation(1),
        step=1000 if running else -1,
        world_size=len(gpus),
        gpus=gpus,
        pids=tuple(range(len(gpus))),
        committed_step=990 if running else -1,
        committed_at_s=NOW_S - 5.0 if running else None,
        grant_generation=claim.grant.generation,
    )


def _pool(node: NodeId, verdicts: Mapping[Hold, Verdict], *, away: bool) -> PoolSeen:
    """`away`: its replicas have left for a claim."""
    lost = sum(1 for gpu in _gpus(node) if (node, gpu, "xid") in verdicts)
    replicas = 0 if away else GPUS_PER_NODE - lost
    return PoolSeen(name=pool_name(node), target=replicas, running=replicas, starting=0, stopping=0)


def _node(index: int, node: NodeId, pools: Mapping[PoolName, PoolSeen]) -> NodeSeen:
    running = pools[pool_name(node)].running
    return NodeSeen(
        id=node,
        address=_address(node),
        gpu_slots=GPUS_PER_NODE,
        # Where replicas have left, the GPUs are held, or the reservation's end has not shown yet.
        free_gpu_slots=float(GPUS_PER_NODE - running if running else 0),
        labels={"tidegate/domain": f"rack-{index // NODES_PER_RACK}"},
        name=f"node-{index}",
    )


def _health(node: NodeId, verdicts: Mapping[Hold, Verdict]) -> HealthReport:
    rules = ((gpu, rule) for gpu in _gpus(node) for rule in ("temperature", "xid"))
    return HealthReport(
        node=node,
        at_s=NOW_S,
        gpus=tuple(GpuSeen(uuid=gpu, index=index, temperature_celsius=60.0) for index, gpu in enumerate(_gpus(node))),
        verdicts=tuple(verdicts[node, gpu, rule] for gpu, rule in rules if (node, gpu, rule) in verdicts),
    )


def _targets(pools: Mapping[PoolName, PoolSeen]) -> dict[PoolName, int]:
    return {name: pool.target for name, pool in pools.items()}


def _gpus(node: NodeId) -> tuple[GpuId, ...]:
    return tuple(_gpu(node, index) for index in range(GPUS_PER_NODE))


def _gpu(node: NodeId, index: int) -> GpuId:
    return GpuId(f"GPU-{node[:12]}-{index}")


def _address(node: NodeId) -> str:
    number = int(node[:12], 16)
    return f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}"
