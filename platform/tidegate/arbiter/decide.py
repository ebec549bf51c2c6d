"""Who holds which GPU: the only place that chooses. Pure.

`decide` looks at the book (what was decided), the view (what is there) and the time, and answers with moves and the
sentence that explains them. It may be called at any moment, also after a restart: every rule reads the present, none
remembers a step in progress.

The flip, in the order that Ray's scheduler forces on us (a pending actor beats a pending placement group):

    queued -> proving    canaries go to the providers
           -> draining   placement group created; gateways told to spill; then, once they follow, targets set to 0
           -> granted    the placement group is ready
           -> running    the gang has made its first step
           -> returning  the group is removed, replicas come home in steps, the spillway closes last
           -> done
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tidegate.arbiter import pools
from tidegate.arbiter.book import (
    ENDED,
    HOLDING,
    Advance,
    Book,
    Claim,
    ClaimState,
    CreateGroup,
    Give,
    Move,
    Probe,
    RemoveGroup,
    Route,
    SetTarget,
)
from tidegate.arbiter.messages import ClaimSpec, GangPhase, Grant, GrantedNode, Spillway
from tidegate.arbiter.placement import Placement, place
from tidegate.arbiter.quarantines import quarantine_moves
from tidegate.arbiter.view import GroupState, View, fit_gpus, live_gateways
from tidegate.ids import ClaimId, Generation, NodeId, Tier, pool_name
from tidegate.spec.policy import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    moves: tuple[Move, ...]
    reason: str


def decide(book: Book, view: View, policy: Policy, now_s: float) -> Decision:
    """What changes now, and why.

    Health goes first (it narrows what may be granted), then claims, then pools, then routes.
    """
    for rule in (_quarantines, _claims, _pools, _routes):
        moves, reason = rule(book, view, policy, now_s)
        if moves:
            # One rule a tick: the next one decides on what this one has changed.
            return Decision(moves=moves, reason=reason)
    return Decision(moves=(), reason=_standing(book))


Moves = tuple[tuple[Move, ...], str]
NOTHING: Moves = ((), "")


def _quarantines(book: Book, view: View, policy: Policy, now_s: float) -> Moves:
    return quarantine_moves(book, view, now_s)


# --- claims -----------------------------------------------------------------------------------------------------


def _claims(book: Book, view: View, policy: Policy, now_s: float) -> Moves:
    classes = policy.claims.classes

    def turn(claim: Claim) -> tuple[int, int, float]:
        return classes.index(claim.spec.claim_class), -claim.spec.order, claim.filed_at_s

    left = tuple(
        RemoveGroup(claim=claim.id)
        for claim in book.claims.values()
        if claim.state in ENDED and view.groups.get(claim.id, GroupState.ABSENT) is not GroupState.ABSENT
    )
    if left:  # a crash between the journal and the act
        return left, "a claim has ended, its reservation has not"
    ahead: Claim | None = None
    for claim in sorted(book.open_claims(), key=turn):
        moves = _claim(book, view, policy, now_s, claim, ahead)
        if moves[0]:
            return moves
        if claim.state in (ClaimState.QUEUED, ClaimState.PROVING):
            ahead = ahead or claim
    return NOTHING


def _claim(book: Book, view: View, policy: Policy, now_s: float, claim: Claim, ahead: Claim | None) -> Moves:
    released = view.releases.get(claim.id)
    match claim.state:
        case ClaimState.QUEUED | ClaimState.PROVING if released is not None:
            return _advance(claim, ClaimState.UNDONE, f"released: {released}", now_s)
        case ClaimState.QUEUED:
            return _queued(book, view, policy, now_s, claim, ahead)
        case ClaimState.PROVING:
            return _proving(book, view, policy, now_s, claim)
        case ClaimState.DRAINING:
            return _draining(book, view, policy, now_s, claim, released)
        case ClaimState.GRANTED | ClaimState.RUNNING:
            return _held(view, now_s, claim, released)
        case ClaimState.RETURNING:
            return _returning(book, view, now_s, claim)
        case ClaimState.DONE | ClaimState.UNDONE:
            return NOTHING


def _queued(book: Book, view: View, policy: Policy, now_s: float, claim: Claim, ahead: Claim | None) -> Moves:
    if ahead is not None:
        return _note(claim, f"waits behind {ahead.spec.name}", now_s)
    found = _placement(book, view, policy, claim)
    if found is None:
        held = sum(len(c.nodes) for c in book.claims.values() if c.state in HOLDING)
        return _note(claim, f"fewer than {claim.spec.min_gpus} fit GPUs can be had now; {held} nodes are held", now_s)
    if policy.serving.protect and _replicas_on(view, found) > 0:
        canary = f"{claim.id}/{book.generation + 1}"
        probe = Probe(claim=claim.id, canary=canary, at_s=now_s)
        advance, reason = _advance(claim, ClaimState.PROVING, f"{found.reason}; proving the way out", now_s)
        return (*advance, probe), reason
    return _begin_drain(book, view, now_s, claim, found, "nothing has to be spilled")


def _proving(book: Book, view: View, policy: Policy, now_s: float, claim: Claim) -> Moves:
    gateways = live_gateways(view, now_s, policy.arbiter.gateway_silent_after_s)
    results = [result for gateway in gateways for result in gateway.canaries if result.canary == claim.canary]
    proven = sorted({result.provider for result in results if result.ok})
    if proven:
        found = _placement(book, view, policy, claim)
        if found is None:
            return _advance(claim, ClaimState.QUEUED, "the GPUs went elsewhere while the way out was proven", now_s)
        return _begin_drain(book, view, now_s, claim, found, f"way out proven: {', '.join(proven)}")
    if now_s - claim.since_s > _deadline_s(policy, claim):
        return _advance(claim, ClaimState.UNDONE, f"no way out within {_deadline_s(policy, claim):.0f} s", now_s)
    if now_s - claim.canary_at_s < policy.claims.proving_retry_s:
        return NOTHING
    if not policy.providers:
        why = "policy.yaml names no providers; serving keeps its GPUs (serving.protect)"
    elif not gateways:
        why = "no gateway reports"
    elif not results:
        why = "no canary has come back yet"
    else:
        why = "; ".join(sorted({f"{result.provider}: {result.detail}" for result in results}))
    note, reason = _note(claim, f"no working way out: {why}", now_s)
    retry = Probe(claim=claim.id, canary=f"{claim.id}/{book.generation + 1}", at_s=now_s)
    return (*note, retry), reason or "another canary"


def _begin_drain(book: Book, view: View, now_s: float, claim: Claim, found: Placement, why: str) -> Moves:
    slots = view.nodes[found.nodes[0]].gpu_slots
    advance, reason = _advance(claim, ClaimState.DRAINING, f"{why}; {found.reason}", now_s, found.nodes)
    leaving = {pool_name(node): 0 for node in found.nodes if pool_name(node) in view.pools}
    route = Route(
        spillway=Spillway.OPEN if leaving else book.orders.spillway,
        allowances={**book.orders.allowances, **leaving},
        reason=f"{claim.spec.name} takes {len(found.nodes)} nodes",
        claim=claim.id,
    )
    group = CreateGroup(claim=claim.id, nodes=found.nodes, gpus_per_node=slots)
    return (*advance, group, route), reason


def _draining(book: Book, view: View, policy: Policy, now_s: float, claim: Claim, released: str | None) -> Moves:
    gone = [node for node in claim.nodes if node not in view.nodes]
    late = now_s - claim.since_s > _deadline_s(policy, claim)
    if released is not None or gone or late:
        why = f"not ready within {_deadline_s(policy, claim):.0f} s"
        if gone:
            why = f"node {gone[0][:12]} is gone"
        if released is not None:
            why = f"released: {released}"
        advance, reason = _advance(claim, ClaimState.UNDONE, why, now_s)
        return (*advance, RemoveGroup(claim=claim.id)), reason
    group = view.groups.get(claim.id, GroupState.ABSENT)
    if group is GroupState.ABSENT:  # a crash between the journal and the act
        slots = view.nodes[claim.nodes[0]].gpu_slots
        return (CreateGroup(claim=claim.id, nodes=claim.nodes, gpus_per_node=slots),), "the reservation is missing"
    if group is GroupState.READY:
        give = Give(claim=claim.id, grant=_grant(book, view, claim))
        advance, reason = _advance(claim, ClaimState.GRANTED, "replicas have left, the gang's nodes are held", now_s)
        return (give, *advance), reason
    followers = live_gateways(view, now_s, policy.arbiter.gateway_silent_after_s)
    if all(gateway.acked >= claim.orders_generation for gateway in followers):
        leaving = [view.pools[pool_name(node)] for node in claim.nodes if pool_name(node) in view.pools]
        down = tuple(
            SetTarget(pool=pool.name, replicas=0, reason=f"drains for {claim.spec.name}", at_s=now_s)
            for pool in leaving
            if book.targets.get(pool.name, pool.target) != 0
        )
        return down, f"gateways spill; {len(down)} pools drain"
    return NOTHING


def _held(view: View, now_s: float, claim: Claim, released: str | None) -> Moves:
    gang = view.gangs.get(claim.id)
    ended = released
    if gang is not None and gang.phase in (GangPhase.FINISHED, GangPhase.FAILED):
        ended = gang.reason or str(gang.phase)
    if ended is not None:
        return _advance(claim, ClaimState.RETURNING, ended, now_s)
    if claim.state is ClaimState.GRANTED and gang is not None and gang.phase is GangPhase.RUNNING:
        return _advance(claim, ClaimState.RUNNING, f"first step with {gang.world_size} ranks", now_s)
    return NOTHING


def _returning(book: Book, view: View, now_s: float, claim: Claim) -> Moves:
    if view.groups.get(claim.id, GroupState.ABSENT) is not GroupState.ABSENT:
        return (RemoveGroup(claim=claim.id),), "the gang has left its nodes"
    # Nodes that another claim has taken meanwhile don't come home for this one.
    mine = [node for node in claim.nodes if book.holder_of(node) is None]
    home = all(
        view.pools[pool_name(node)].running >= pools.room_for_serving(view, book, view.nodes[node])
        for node in mine
        if node in view.nodes and pool_name(node) in view.pools
    )
    return _advance(claim, ClaimState.DONE, "its GPUs serve again", now_s) if home else NOTHING


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What would become of a claim if it were filed now."""

    reason: str
    nodes: tuple[NodeId, ...]
    """Those it would get; empty where it would wait."""
    gpus: int
    replicas_leaving: int


def forecast(book: Book, view: View, policy: Policy, spec: ClaimSpec, now_s: float) -> Forecast:
    """The decision on a hypothetical claim; nothing is filed."""
    claim = Claim(id=ClaimId(f"{spec.name} (dry run)"), spec=spec, filed_at_s=now_s, since_s=now_s, reason="")
    waiting = [c for c in book.open_claims() if c.state in (ClaimState.QUEUED, ClaimState.PROVING)]
    classes = policy.claims.classes
    mine = (classes.index(spec.claim_class), -spec.order)
    ahead = [c for c in waiting if (classes.index(c.spec.claim_class), -c.spec.order) <= mine]
    _, reason = _queued(book, view, policy, now_s, claim, ahead[0] if ahead else None)
    found = _placement(book, view, policy, claim) if not ahead else None
    if found is None:
        return Forecast(reason=reason, nodes=(), gpus=0, replicas_leaving=0)
    return Forecast(
        reason=reason,
        nodes=found.nodes,
        gpus=min(found.gpus, spec.max_gpus),
        replicas_leaving=_replicas_on(view, found),
    )


# --- pools and routes -------------------------------------------------------------------------------------------


def _pools(book: Book, view: View, policy: Policy, now_s: float) -> Moves:
    moves = pools.reassertions(view, book, now_s) + pools.raises(view, book, policy.serving, now_s)
    return moves, "; ".join(dict.fromkeys(move.reason for move in moves))


def _routes(book: Book, view: View, policy: Policy, now_s: float) -> Moves:
    """Allowances follow the targets; the spillway closes when everybody is home, and not before."""
    held = {pool_name(node) for c in book.claims.values() if c.state in HOLDING for node in c.nodes}
    allowances = {
        pool: 0 if pool in held else book.targets.get(pool, seen.target) for pool, seen in sorted(view.pools.items())
    }
    spillway = book.orders.spillway
    busy = any(c.state in HOLDING or c.state is ClaimState.RETURNING for c in book.claims.values())
    if spillway is Spillway.OPEN and not busy and pools.all_home(view, book):
        spillway = Spillway.CLOSED
    if spillway is book.orders.spillway and allowances == dict(book.orders.allowances):
        return NOTHING
    reason = "all replicas are home: the spillway closes" if spillway is not book.orders.spillway else "targets changed"
    return (Route(spillway=spillway, allowances=allowances, reason=reason),), reason


# --- small pieces -----------------------------------------------------------------------------------------------


def _placement(book: Book, view: View, policy: Policy, claim: Claim) -> Placement | None:
    classes = policy.claims.classes
    stronger = classes.index(claim.spec.claim_class) < classes.index("serving")
    found = place(view, book, claim.spec, may_move_serving=stronger)
    if found is None or policy.serving.floor_replicas == 0:
        return found
    left = sum(count for pool, count in pools.wanted(view, book).items() if pool not in map(pool_name, found.nodes))
    if left >= policy.serving.floor_replicas:
        return found
    # Leave the floor alone: ask for as much less as the floor needs.
    less = replace(claim.spec, max_gpus=claim.spec.max_gpus - 1)
    if less.max_gpus < less.min_gpus:
        return None
    return _placement(book, view, policy, replace(claim, spec=less))


def _replicas_on(view: View, found: Placement) -> int:
    names = [pool_name(node) for node in found.nodes]
    return sum(view.pools[name].holding for name in names if name in view.pools)


def _grant(book: Book, view: View, claim: Claim) -> Grant:
    nodes = tuple(
        GrantedNode(node=node, address=view.nodes[node].address, gpus=fit_gpus(view, book, view.nodes[node], Tier.GANG))
        for node in claim.nodes
    )
    return Grant(
        claim=claim.id,
        generation=Generation(book.generation + 1),
        placement_group=group_name(claim),
        gpus_per_node=view.nodes[claim.nodes[0]].gpu_slots,
        nodes=nodes,
    )


def group_name(claim: Claim) -> str:
    """Name of the claim's detached placement group."""
    return f"tidegate-{claim.id}"


def _deadline_s(policy: Policy, claim: Claim) -> float:
    return claim.spec.deadline_s or policy.claims.deadline_s


def _advance(
    claim: Claim, to: ClaimState, reason: str, now_s: float, nodes: tuple[NodeId, ...] | None = None
) -> tuple[tuple[Advance], str]:
    move = Advance(claim=claim.id, to=to, reason=reason, at_s=now_s, nodes=nodes)
    return (move,), f"{claim.spec.name}: {to}: {reason}"


def _note(claim: Claim, reason: str, now_s: float) -> Moves:
    """Say why a claim waits, once: the same sentence is not written again."""
    if claim.reason == reason:
        return NOTHING
    return _advance(claim, claim.state, reason, now_s)


def _standing(book: Book) -> str:
    waiting = [f"{c.spec.name}: {c.reason}" for c in book.open_claims() if c.state is not ClaimState.RUNNING]
    return "; ".join(waiting) or "nothing to change"
