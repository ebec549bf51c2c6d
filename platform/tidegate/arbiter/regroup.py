"""A held gang whose nodes change: one is lost, leaves or comes. Pure.

*Lost* (a node died, its placement group broke, too few GPUs are left): the gang stands still, so it forms again at
once on what it has and the best spare nodes. *Leaving* (a verdict against the node, or Ray drains it) and *growing*:
the gang runs on while the new nodes are emptied (`Claim.joining`), and forms again right after a checkpoint. In all
three it keeps the nodes it has, and goes on smaller where there is no spare but its minimum is there; else it queues
again.
"""

from __future__ import annotations

import math

from tidegate.arbiter.claim import Claim
from tidegate.arbiter.drain import close, drain, is_empty
from tidegate.arbiter.grants import fit_on, fit_on_each, give_again
from tidegate.arbiter.messages import GangPhase
from tidegate.arbiter.moves import Evict, Join, Move
from tidegate.arbiter.placement import nodes_wanted
from tidegate.arbiter.preemption import leave
from tidegate.arbiter.search import search
from tidegate.arbiter.situation import NOTHING, Moves, Situation, advance, let_go, reserve, unreserve
from tidegate.arbiter.states import WAITING, ClaimState
from tidegate.arbiter.view import GroupState, gpus_of, is_out
from tidegate.ids import NodeId

NOTICE_REPEAT_S = 2.0
"""A gang that still stands on a draining node after this long is told again."""


def regroup(s: Situation, claim: Claim) -> Moves:
    """What changes about the nodes of a granted or running claim."""
    nodes, quarantined = s.view.nodes, s.book.quarantined
    gone = [node for node in claim.nodes if node not in nodes]
    if gone:
        return again(s, claim, f"node {gone[0][:12]} is gone")
    if s.group(claim) is not GroupState.READY:
        return again(s, claim, "its placement group is lost")
    out = [node for node in filter(quarantined.__contains__, claim.nodes) if is_out(s.book, node)]
    draining = [node for node in claim.nodes if nodes[node].drains_by_s is not None]
    fit = fit_on_each(s, claim)
    left = sum(fit.values()) - sum(fit[node] for node in out)
    if left < claim.spec.min_gpus:
        return again(s, claim, f"{left} fit GPUs are left, it needs {claim.spec.min_gpus}")
    for moves in (_notices(s, claim, draining), _swap_or_grow(s, claim, out, draining), give_again(s, claim, fit)):
        if moves[0]:
            return moves
    return NOTHING


def unfit(s: Situation, claim: Claim) -> str | None:
    """Why a claim that drains can't have the nodes that were chosen for it any more, if so."""
    for node in claim.nodes:
        seen = s.view.nodes.get(node)
        if seen is None or seen.drains_by_s is not None:
            return f"node {node[:12]} is {'gone' if seen is None else 'drained'}"
        if node in s.book.quarantined and is_out(s.book, node):
            return f"a verdict stands against node {node[:12]}"
    left = sum(fit_on_each(s, claim).values())
    return f"{left} fit GPUs are left, it needs {claim.spec.min_gpus}" if left < claim.spec.min_gpus else None


def again(s: Situation, claim: Claim, why: str) -> Moves:
    """Form again at once, on the nodes that are left and the best spare ones; without its minimum it queues again."""
    there = [node for node in (*claim.nodes, *claim.joining) if _is_fit(s, claim, node)]
    keep = tuple(node for node in there if s.view.nodes[node].gpu_slots == s.view.nodes[there[0]].gpu_slots)
    found = search(s, claim, keep=keep, may_move_serving=s.may_spill)
    if found is not None:
        return _form(s, claim, found.nodes, f"{why}; again on {found.reason}")
    return let_go(s, claim, ClaimState.QUEUED, f"{why}; {claim.spec.min_gpus} fit GPUs can't be had now")


def _swap_or_grow(s: Situation, claim: Claim, out: list[NodeId], draining: list[NodeId]) -> Moves:
    leaving = {*out, *draining}
    wanted = nodes_wanted(claim.spec, s.view.nodes[claim.nodes[0]].gpu_slots)
    room = max(wanted - len(claim.nodes), 0) + len(leaving)
    grows = room > 0 and not leaving and claim.state is ClaimState.RUNNING and not _others_wait(s, claim)
    if not leaving and not grows:
        if claim.joining:
            return _join(s, claim, (), "called off: another claim waits, or nothing is missing")
        return NOTHING
    stay = tuple(node for node in claim.nodes if node not in leaving)
    coming = tuple(node for node in claim.joining if _is_fit(s, claim, node))[:room]
    found = search(s, claim, keep=(*stay, *coming), may_move_serving=s.may_spill)
    if found is None and grows:
        return NOTHING
    if found is None:  # only a node that drains brings it below its minimum: it works until then
        by_s = min((s.view.nodes[node].drains_by_s or math.inf for node in draining), default=math.inf)
        notice_s = s.now_s + s.policy.claims.preempt_notice_s
        why = f"node {next(iter(leaving))[:12]} must leave, and nothing can take its place"
        return leave(s, claim, why, by_s if by_s < math.inf else notice_s), why
    new = found.nodes[len(stay) : len(stay) + room]
    why = f"node {sorted(leaving)[0][:12]} leaves" if leaving else f"it may have {claim.spec.max_gpus} GPUs"
    if new != claim.joining:
        return _join(s, claim, new, why)
    if new and claim.freed_at_s is None:
        if all(is_empty(s, node) for node in new):
            move = Join(claim=claim.id, nodes=new, freed=True, reason=f"{len(new)} nodes are free", at_s=s.now_s)
            return (move,), f"{claim.spec.name}: {move.reason}; it forms again after its next checkpoint"
        return drain(s, claim, new)
    if (new or leaving) and _has_saved(s, claim, leaving):
        return _form(s, claim, (*stay, *new), f"{why}; {len(stay)} nodes stay, {len(new)} join")
    return NOTHING


def _join(s: Situation, claim: Claim, nodes: tuple[NodeId, ...], why: str) -> Moves:
    move = Join(claim=claim.id, nodes=nodes, freed=False, reason=why, at_s=s.now_s)
    return (move, *close(s, claim, nodes)), f"{claim.spec.name}: {len(nodes)} nodes are freed for it: {why}"


def _form(s: Situation, claim: Claim, nodes: tuple[NodeId, ...], why: str) -> Moves:
    """Under a new placement group. The old one goes first: its bundles lie on the same GPUs."""
    moves, said = advance(s, claim, ClaimState.DRAINING, why, nodes=nodes)
    return (*moves, unreserve(claim), reserve(s, claim, nodes), *close(s, claim, nodes)), said


def _notices(s: Situation, claim: Claim, draining: list[NodeId]) -> Moves:
    """Tell a gang that stands on a draining node to save before it goes."""
    gang = s.gang(claim)
    moves: list[Move] = []
    for node in draining if gang is not None else ():
        seen = s.view.nodes[node]
        stands = gang is not None and any(gpu.uuid in gang.gpus for gpu in gpus_of(s.view, seen))
        told_s = claim.evicted_at_s.get(node)
        if not stands or (told_s is not None and s.now_s - told_s < NOTICE_REPEAT_S):
            continue
        by_s = seen.drains_by_s if seen.drains_by_s is not None and seen.drains_by_s < math.inf else None
        left = f"in {max(0.0, by_s - s.now_s):.0f} s" if by_s is not None else "soon"
        save_by_s = by_s if by_s is not None else s.now_s + s.policy.claims.preempt_notice_s
        moves.append(
            Evict(
                claim=claim.id,
                node=node,
                gpu=None,
                reason=f"Ray drains the node: it goes {left}",
                reading_at_s=s.now_s,
                at_s=s.now_s,
                save_by_s=save_by_s,
            )
        )
    return tuple(moves), f"{claim.spec.name}: {len(moves)} of its nodes drain"


def _has_saved(s: Situation, claim: Claim, leaving: set[NodeId]) -> bool:
    """Whether a checkpoint is newer than all that it waits for; a gang that has not begun has nothing to save."""
    gang = s.gang(claim)
    if gang is None or gang.phase is GangPhase.FORMING:
        return claim.state is ClaimState.GRANTED
    since_s = max(
        claim.freed_at_s or 0.0,
        *(claim.evicted_at_s.get(node, 0.0) for node in leaving),
        *(q.since_s for node in leaving for q in s.book.quarantined.get(node, ())),
        0.0,
    )
    return gang.committed_at_s is not None and gang.committed_at_s >= since_s


def _is_fit(s: Situation, claim: Claim, node: NodeId) -> bool:
    seen = s.view.nodes.get(node)
    return (
        seen is not None
        and seen.drains_by_s is None
        and not is_out(s.book, node)
        and fit_on(s, claim, node) >= (claim.spec.gpus_per_node or 1)
    )


def _others_wait(s: Situation, claim: Claim) -> bool:
    return any(other.state in WAITING and s.rank(other) <= s.rank(claim) for other in s.open_claims)
