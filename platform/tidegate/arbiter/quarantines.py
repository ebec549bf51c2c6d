"""Which GPUs are kept from gangs: the agents' verdicts, turned into moves. Pure.

A person's quarantines (`tidegate quarantine`) are in the book too; only a person lifts those.
"""

from __future__ import annotations

from tidegate.arbiter.book import HOLDING, OPERATOR_RULE, Book, Evict, Impose, Lift, Move, hold_of
from tidegate.arbiter.messages import Action, Verdict, When
from tidegate.arbiter.view import View, standing_on
from tidegate.ids import GpuId, NodeId


def quarantine_moves(book: Book, view: View, now_s: float) -> tuple[tuple[Move, ...], str]:
    """Follow the agents' verdicts: impose new ones (and take the GPU out of its gang), lift those that ended."""
    moves: list[Move] = []
    for report in view.health.values():
        standing = {hold_of(v): v for v in report.verdicts if v.action is not Action.WARN}
        for hold, verdict in standing.items():
            held = book.quarantines.get(hold)
            if held is None or (held.verdict.tier, held.verdict.action) != (verdict.tier, verdict.action):
                moves.append(Impose(verdict=verdict, at_s=now_s))
        if report.gpus:  # an agent that sees no GPU can't say that one is well
            for hold, quarantine in book.quarantines.items():
                node, gpu, rule = hold
                if node == report.node and rule != OPERATOR_RULE and hold not in standing:
                    ended = f"the agent lifted it: {quarantine.verdict.ends}"
                    moves.append(Lift(node=node, gpu=gpu, rule=rule, reason=ended))
    moves.extend(_evictions(book, view, now_s))
    return tuple(moves), "; ".join(_said(move) for move in moves)


EVICTION_REPEAT_S = 2.0
"""A gang that still names an evicted GPU after this long is told again (the order may have been lost)."""


def _evictions(book: Book, view: View, now_s: float) -> tuple[Evict, ...]:
    """Ranks that stand on a quarantined GPU."""
    moves = []
    for claim in book.claims.values():
        gang = view.gangs.get(claim.id)
        if claim.state not in HOLDING or gang is None or claim.grant is None:
            continue
        told: set[str] = set()
        node_of = {gpu: node.node for node in claim.grant.nodes for gpu in node.gpus}
        for gpu in gang.gpus:
            node = node_of.get(gpu)
            held = _leaves_now(book, node, gpu) if node is not None else None
            if node is None or held is None:
                continue
            whole = held.action is Action.EVICT_NODE
            subject = node if whole else gpu
            if subject in told or now_s - claim.evicted_at_s.get(subject, -EVICTION_REPEAT_S) < EVICTION_REPEAT_S:
                continue
            told.add(subject)
            moves.append(
                Evict(
                    claim=claim.id,
                    node=node,
                    gpu=None if whole else gpu,
                    reason=held.evidence,
                    reading_at_s=held.at_s,
                    at_s=now_s,
                )
            )
    return tuple(moves)


def _leaves_now(book: Book, node: NodeId, gpu: GpuId) -> Verdict | None:
    """The verdict for which a GPU must leave its gang at once; one against its node goes first."""
    now = [q.verdict for q in standing_on(book, node, gpu) if q.verdict.when is When.NOW]
    return min(now, key=lambda verdict: verdict.action is not Action.EVICT_NODE, default=None)


def _said(move: Move) -> str:
    match move:
        case Impose():
            return f"quarantine {move.verdict.gpu or move.verdict.node}: {move.verdict.evidence}"
        case Lift() | Evict():
            return f"{move.kind} {move.gpu or move.node}: {move.reason}"
        case _:
            return move.kind
