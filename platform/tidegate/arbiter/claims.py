"""Each claim's next step, in the order of their turns. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from tidegate.arbiter import pools
from tidegate.arbiter.claim import Claim
from tidegate.arbiter.drain import close, drain
from tidegate.arbiter.grants import are_listed, give, unknown_memory
from tidegate.arbiter.messages import GangPhase
from tidegate.arbiter.moves import Probe, RemoveGroup
from tidegate.arbiter.placement import Placement
from tidegate.arbiter.preemption import leave, preempted, reclaim, victims
from tidegate.arbiter.regroup import again, regroup, unfit
from tidegate.arbiter.search import resting, search
from tidegate.arbiter.situation import NOTHING, Moves, Situation, advance, let_go, named, note, reserve, unreserve
from tidegate.arbiter.states import HOLDING, WAITING, ClaimState
from tidegate.arbiter.view import GroupState
from tidegate.ids import pool_name

REPORTS_WAITED_FOR = 3
"""After a restart a grant waits so many of the health agents' periods for their first reports."""


def claim_moves(s: Situation) -> Moves:
    """What the claims' turn brings: one claim's step at a time."""
    left = [unreserve(claim) for claim in map(s.book.claims.__getitem__, s.view.groups) if claim.state not in HOLDING]
    left += [RemoveGroup(claim=claim, group=name) for name, claim in s.view.leaked.items()]
    if left:  # a crash between the journal and the act, or the gang has left
        return tuple(left), "reservations that no claim stands on any more"
    taken_back = reclaim(s)
    if taken_back[0]:
        return taken_back
    waiting: list[Claim] = []
    for claim in s.open_claims:
        moves = _step(s, claim, waiting)
        if moves[0]:
            return moves
        if claim.state in WAITING:
            waiting.append(claim)
    return NOTHING


def _step(s: Situation, claim: Claim, waiting: list[Claim]) -> Moves:
    """`waiting`: those whose turn is before its own."""
    over = s.over(claim)
    match claim.state:
        case ClaimState.QUEUED | ClaimState.PROVING if over is not None:
            return advance(s, claim, ClaimState.DONE if claim.ever_ran else ClaimState.UNDONE, f"released: {over}")
        case ClaimState.QUEUED:
            return queued(s, claim, waiting)
        case ClaimState.PROVING:
            return _proving(s, claim)
        case ClaimState.DRAINING:
            return _draining(s, claim, over)
        case ClaimState.GRANTED | ClaimState.RUNNING | ClaimState.PREEMPTED if over is not None:
            return advance(s, claim, ClaimState.RETURNING, over)
        case ClaimState.GRANTED | ClaimState.RUNNING:
            return _held(s, claim)
        case ClaimState.PREEMPTED:
            return preempted(s, claim)
        case ClaimState.RETURNING:
            return _returning(s, claim)
        case ClaimState.DONE | ClaimState.UNDONE:
            return NOTHING


# --- waiting ----------------------------------------------------------------------------------------------------


def queued(s: Situation, claim: Claim, waiting: Sequence[Claim]) -> Moves:
    """The step of a claim that waits; `waiting`: those whose turn is before its own."""
    patience_s = claim.spec.patience_s
    if patience_s is not None and not claim.ever_ran and s.now_s - claim.filed_at_s > patience_s:
        why = f"its turn did not come within {patience_s:.0f} s: {claim.reason}"
        return advance(s, claim, ClaimState.UNDONE, why)
    # What leaves on notice may fill what a stronger claim can't use yet.
    ahead = [other for other in waiting if s.is_above_serving(claim) or s.rank(other) == s.rank(claim)]
    if ahead:
        return note(s, claim, f"waits behind {ahead[0].spec.name}")
    found = find(s, claim)
    if found is None:
        return note(s, claim, _why_not(s, claim))
    placement, leaving = found
    over = s.over_budget if s.policy.purse.over_budget == "wait" else None
    if over is not None and s.replicas_on(placement.nodes) > 0:
        other = search(s, claim, may_move_serving=False)
        if other is None:
            return note(s, claim, f"it needs serving's GPUs, and {over.reason}")
        placement, leaving = other, ()
    if s.policy.serving.protect and s.is_above_serving(claim) and s.replicas_on(placement.nodes) > 0:
        probe = Probe(claim=claim.id, canary=f"{claim.id}/{s.book.generation + 1}", at_s=s.now_s)
        moves, said = advance(s, claim, ClaimState.PROVING, f"{placement.reason}; proving the way out")
        return (*moves, probe), said
    return _begin(s, claim, placement, leaving, "nothing has to be spilled")


def find(s: Situation, claim: Claim) -> tuple[Placement, tuple[Claim, ...]] | None:
    """Where the claim can go now, and which weaker claims leave for it."""
    free = search(s, claim)
    if free is not None:
        return free, ()
    # Nodes that rest will be there soon: nobody leaves in their stead.
    return victims(s, claim) if not resting(s, claim) else None


def _why_not(s: Situation, claim: Claim) -> str:
    why = f"fewer than {claim.spec.min_gpus} fit GPUs can be had now; {len(s.book.holders)} nodes are held"
    if resting(s, claim):
        why += f", and what came home stays for {s.policy.claims.dwell_s:.0f} s"
    return why


def _proving(s: Situation, claim: Claim) -> Moves:
    results = [result for gateway in s.gateways for result in gateway.canaries if result.canary == claim.canary]
    proven = sorted({result.provider for result in results if result.ok})
    if proven:
        found = find(s, claim)
        if found is None:
            return advance(s, claim, ClaimState.QUEUED, "the GPUs went elsewhere while the way out was proven")
        return _begin(s, claim, *found, f"way out proven: {', '.join(proven)}")
    if s.is_late(claim) and not claim.ever_ran:
        return advance(s, claim, ClaimState.UNDONE, f"no way out within {s.deadline_s(claim):.0f} s")
    if s.now_s - claim.canary_at_s < s.policy.claims.proving_retry_s:
        return NOTHING
    if not s.policy.providers:
        why = "policy.yaml names no providers; serving keeps its GPUs (serving.protect)"
    elif not s.gateways:
        why = "no gateway reports"
    elif not results:
        why = "no canary has come back yet"
    else:
        why = "; ".join(sorted({f"{result.provider}: {result.detail}" for result in results}))
    noted, said = note(s, claim, f"no working way out: {why}")
    retry = Probe(claim=claim.id, canary=f"{claim.id}/{s.book.generation + 1}", at_s=s.now_s)
    return (*noted, retry), said or "another canary"


def _begin(s: Situation, claim: Claim, found: Placement, leaving: tuple[Claim, ...], why: str) -> Moves:
    if leaving:
        why = f"{why}; {named(leaving)} must leave"
    moves, said = advance(s, claim, ClaimState.DRAINING, f"{why}; {found.reason}", nodes=found.nodes)
    out = [move for other in leaving for move in leave(s, other, f"{claim.spec.name} goes first")]
    return (*moves, *out, reserve(s, claim, found.nodes), *close(s, claim, found.nodes)), said


# --- holding ----------------------------------------------------------------------------------------------------


def _draining(s: Situation, claim: Claim, over: str | None) -> Moves:
    if over is not None and claim.ever_ran:
        return advance(s, claim, ClaimState.RETURNING, over)
    if over is not None:
        return let_go(s, claim, ClaimState.UNDONE, f"released: {over}")
    changed = unfit(s, claim)
    if changed is not None:
        return again(s, claim, changed)
    if s.is_late(claim):
        why = f"not ready within {s.deadline_s(claim):.0f} s"
        if unknown := unknown_memory(s, claim):
            why = f"{why}: {unknown}"
        return let_go(s, claim, ClaimState.QUEUED if claim.ever_ran else ClaimState.UNDONE, why)
    group = s.group(claim)
    if group is GroupState.ABSENT:  # a crash between the journal and the act
        return (reserve(s, claim, claim.nodes),), "the reservation is missing"
    if group is GroupState.READY:
        settles_s = REPORTS_WAITED_FOR * s.policy.health.period_s
        if s.view.up_for_s < settles_s and not are_listed(s, claim):
            return NOTHING  # the GPUs' names come with the agents' reports
        if unknown := unknown_memory(s, claim):
            return note(s, claim, unknown)
        moves, said = advance(s, claim, ClaimState.GRANTED, "replicas have left, the gang's nodes are held")
        return (give(s, claim), *moves), said
    return drain(s, claim, claim.nodes)


def _held(s: Situation, claim: Claim) -> Moves:
    moves = regroup(s, claim)
    if moves[0]:
        return moves
    gang = s.gang(claim)
    if claim.state is not ClaimState.GRANTED or gang is None or gang.phase is not GangPhase.RUNNING:
        return NOTHING
    if claim.grant is not None and gang.grant_generation not in (None, claim.grant.generation):
        return NOTHING  # it reports from before it formed again
    return advance(s, claim, ClaimState.RUNNING, f"first step with {gang.world_size} ranks")


def _returning(s: Situation, claim: Claim) -> Moves:
    # Nodes that another claim has taken meanwhile don't come home for this one.
    seen, held = s.view.nodes, s.book.holders
    mine = [(node, s.view.pools.get(pool_name(node))) for node in claim.nodes if node in seen and node not in held]
    away = [
        node
        for node, pool in mine
        if pool is not None and pool.running < pools.room_for_serving(s.view, s.book, seen[node])
    ]
    if not away:
        return advance(s, claim, ClaimState.DONE, "its GPUs serve again")
    if s.now_s - claim.since_s > s.deadline_s(claim):
        return advance(s, claim, ClaimState.DONE, f"its GPUs are free; replicas on {len(away)} nodes do not come up")
    return NOTHING
