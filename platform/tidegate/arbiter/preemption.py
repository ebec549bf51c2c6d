"""Who leaves for a stronger claim, or for serving's traffic. Pure.

Only a stronger class takes GPUs; equals queue. Whoever leaves is told by when; it saves, leaves and queues again in its
old place. Nobody is asked to leave unless that makes the claim's placement possible, and nobody who is not needed.
"""

from __future__ import annotations

from tidegate.arbiter.claim import Claim
from tidegate.arbiter.messages import GangPhase
from tidegate.arbiter.moves import Move
from tidegate.arbiter.placement import Placement, work_lost_s
from tidegate.arbiter.search import search
from tidegate.arbiter.situation import NOTHING, Moves, Situation, advance, ids, let_go, named
from tidegate.arbiter.states import HOLDING, ClaimState
from tidegate.arbiter.view import overflow
from tidegate.ids import pool_name


def victims(s: Situation, claim: Claim) -> tuple[Placement, tuple[Claim, ...]] | None:
    """Where the claim goes if others leave, and who does: the weakest class, then the lowest order, then the least work
    lost, then the fewest nodes beyond the need. None: even all of them would not do, or there is nobody."""
    weaker = [c for c in s.book.claims.values() if c.state in HOLDING and s.rank(c) > s.rank(claim) and may_leave(s, c)]
    if not weaker or search(s, claim, taking_from=ids(weaker)) is None:
        return None

    def cost(other: Claim) -> tuple[bool, int, int, float, int]:
        leaves_anyway = other.state is ClaimState.PREEMPTED
        beyond = (
            max(0, len(other.nodes) * s.view.nodes[other.nodes[0]].gpu_slots - claim.spec.min_gpus)
            if (other.nodes and other.nodes[0] in s.view.nodes)
            else 0
        )
        return not leaves_anyway, -s.rank(other), other.spec.order, work_lost_s(s.view, other, s.now_s), beyond

    leaving: list[Claim] = []
    for other in sorted(weaker, key=cost):
        leaving.append(other)
        if search(s, claim, taking_from=ids(leaving)) is not None:
            break
    # Some that were taken first may not be needed any more; spare those that cost most.
    for other in sorted(leaving, key=cost, reverse=True):
        without = [c for c in leaving if c is not other]
        if search(s, claim, taking_from=ids(without)) is not None:
            leaving = without
    found = search(s, claim, taking_from=ids(leaving))
    return (found, tuple(leaving)) if found is not None else None


def may_leave(s: Situation, claim: Claim) -> bool:
    """A class above serving has its minimum run time; one that still drains for its first has nothing to lose."""
    if not s.is_above_serving(claim) or claim.state is ClaimState.PREEMPTED:
        return True
    if claim.state is ClaimState.DRAINING and claim.runs_since_s is None:
        return True
    since_s = claim.since_s if claim.runs_since_s is None else claim.runs_since_s
    return s.now_s - since_s >= s.policy.claims.min_run_s


def leave(s: Situation, claim: Claim, why: str, by_s: float | None = None) -> tuple[Move, ...]:
    """Ask a claim's gang to save and leave; one that has no gang yet goes back to the queue at once."""
    if claim.state is ClaimState.PREEMPTED:
        return ()
    if claim.state is ClaimState.DRAINING:
        return let_go(s, claim, ClaimState.QUEUED, why)[0]
    by_s = s.now_s + s.policy.claims.preempt_notice_s if by_s is None else by_s
    return advance(s, claim, ClaimState.PREEMPTED, why, leave_by_s=by_s)[0]


def preempted(s: Situation, claim: Claim) -> Moves:
    """It has left, or its time is over: its nodes go to whom they were taken for, and it queues in its old place."""
    gang = s.gang(claim)
    if gang is not None and gang.phase is GangPhase.LEFT:
        why = f"has saved step {gang.committed_step} and left; {claim.reason}"
    elif claim.leave_by_s is None or s.now_s >= claim.leave_by_s:
        why = f"its notice is over; {claim.reason}"
    else:
        return NOTHING
    return let_go(s, claim, ClaimState.QUEUED, why)


def reclaim(s: Situation) -> Moves:
    """Serving takes GPUs back from the classes below it when its requests have overflowed for long enough (C031).

    As many claims leave as the overflow needs GPUs; those after them only when it goes on although these have left.
    """
    if s.view.overflow_for_s < s.policy.serving.reclaim_after_s:
        return NOTHING
    below = [
        claim
        for claim in s.book.claims.values()
        if claim.state in HOLDING
        and not s.is_above_serving(claim)
        and any(pool_name(node) in s.view.pools for node in claim.nodes)
    ]
    if any(claim.state is ClaimState.PREEMPTED for claim in below):
        return NOTHING
    requests = sum(overflow(gateway) for gateway in s.gateways)
    leaving: list[Claim] = []
    freed = 0
    for claim in sorted(below, key=lambda c: (-s.rank(c), c.spec.order, work_lost_s(s.view, c, s.now_s), c.filed_at_s)):
        if freed >= max(1, requests):
            break
        leaving.append(claim)
        freed += sum(s.view.nodes[node].gpu_slots for node in claim.nodes if node in s.view.nodes)
    if not leaving:
        return NOTHING
    why = f"serving needs its GPUs: {requests} requests overflow"
    moves = tuple(move for claim in leaving for move in leave(s, claim, why))
    return moves, f"{why}; {named(leaving)} leave"
