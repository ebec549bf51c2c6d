"""Which GPUs are kept from gangs: the agents' verdicts, turned into moves. Pure.

A person's quarantines (`tidegate quarantine`) are in the book too; only a person lifts those, and no brake holds them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tidegate.arbiter.book import Book, apply
from tidegate.arbiter.messages import Action, Verdict, When
from tidegate.arbiter.moves import OPERATOR_RULE, Brake, Evict, Hold, Impose, Lift, Move, Unbrake, hold_of
from tidegate.arbiter.states import HOLDING
from tidegate.arbiter.view import DOMAIN_LABEL, View, gpus_of, standing_on
from tidegate.ids import GpuId, NodeId, Tier
from tidegate.spec.policy import FleetBrakeSpec

SILENT_RULE = "agent_silent"
"""The one verdict that no agent can give."""


BURN_IN_RULE = "burn_in"
"""Holds what is out already until it has been examined: it takes nothing more out, so no brake holds it."""


def quarantine_moves(book: Book, view: View, brake: FleetBrakeSpec, now_s: float) -> tuple[tuple[Move, ...], str]:
    """Follow the agents' verdicts: impose new ones (and take the GPU out of its gang) as far as the fleet brake lets
    them, lift those that ended."""
    standing: dict[Hold, Verdict] = {
        hold_of(verdict): verdict
        for report in view.telling.values()
        for verdict in report.verdicts
        if verdict.action is not Action.WARN and not _is_of_nothing(book, verdict)
    } | {hold_of(verdict): verdict for verdict in _silences(view)}
    moves: list[Move] = [*_impositions(book, view, brake, standing, now_s)]
    for hold, quarantine in book.quarantines.items():
        node, gpu, rule = hold
        if rule != OPERATOR_RULE and hold not in standing and _sees(view, node):
            ended = f"the agent lifted it: {quarantine.verdict.ends}"
            moves.append(Lift(node=node, gpu=gpu, rule=rule, reason=ended))
    for hold, finding in book.held_back.items():
        node, gpu, rule = hold
        ended = f"the agent lifted it: {finding.verdict.ends}" if node in view.nodes else "its node is gone"
        if hold not in standing and (_sees(view, node) or node not in view.nodes):
            moves.append(Unbrake(rule=rule, node=node, gpu=gpu, reason=ended, at_s=now_s))
    for move in moves:
        book = apply(book, move)
    # By what is imposed just now too: whoever is hot must not wait for another tick.
    moves.extend(_evictions(book, view, now_s))
    return tuple(moves), "; ".join(_said(move) for move in moves)


def _is_of_nothing(book: Book, verdict: Verdict) -> bool:
    """Whether what is to come back by a burn-in was never taken out: the brake held, or a person was quicker."""
    if verdict.rule != BURN_IN_RULE:
        return False
    return not any(quarantine.verdict.gpu == verdict.gpu for quarantine in book.quarantined.get(verdict.node, ()))


def _silences(view: View) -> Iterator[Verdict]:
    """Nodes of which nobody tells whether they are well (table 4.1, row 44). What else stands against them goes on."""
    for node, since_s in view.silent_since_s.items():
        yield Verdict(
            at_s=since_s,
            node=node,
            gpu=None,
            rule=SILENT_RULE,
            action=Action.EVICT_NODE,
            when=When.NOW,
            tier=Tier.SERVE,
            evidence="its health agent is silent for longer than health.agent_silent_after_s: nobody watches its GPUs",
            ends="the agent reports again",
        )


def _impositions(
    book: Book, view: View, brake: FleetBrakeSpec, standing: dict[Hold, Verdict], now_s: float
) -> Iterable[Impose | Brake]:
    """What stands and is not in the book yet, the oldest finding first: that is the order in which the brake bites."""
    braked = {rule for _, _, rule in book.held_back}
    taken = {
        rule: {node for node, at_s in nodes.items() if now_s - at_s < brake.window_s}
        for rule, nodes in book.imposed_at_s.items()
    }
    for hold, verdict in sorted(standing.items(), key=lambda item: (item[1].at_s, item[0][0], item[0][1] or "")):
        held = book.quarantines.get(hold)
        if held is not None:
            if (held.verdict.tier, held.verdict.action) != (verdict.tier, verdict.action):
                yield Impose(verdict=verdict, at_s=now_s)
            continue
        out = taken.setdefault(verdict.rule, set())
        free = (
            verdict.node in out
            or _is_out(book, verdict)  # by this rule already: no further node
            or verdict.rule in (*brake.hard_faults, BURN_IN_RULE)
            or now_s - book.unbraked_at_s.get(verdict.rule, -brake.window_s) < brake.window_s
        )
        why = None if free else _too_many(view, brake, verdict, out)
        if why is None and (free or verdict.rule not in braked):
            out.add(verdict.node)
            yield Impose(verdict=verdict, at_s=now_s)
            continue
        braked.add(verdict.rule)
        if hold not in book.held_back:
            reason = f"fleet brake on rule {verdict.rule}: {why or 'it is on'}"
            yield Brake(verdict=verdict, reason=f"{reason}; `tidegate pardon {verdict.rule}` lets it go on", at_s=now_s)


def _too_many(view: View, brake: FleetBrakeSpec, verdict: Verdict, out: set[NodeId]) -> str | None:
    """Why one more node may not go by this rule, if so; `out` are those that it took out within the window."""
    allowed = max(1, int(brake.node_share * len(view.nodes) + 1e-9))
    if len(out) >= allowed:
        return f"{len(out)} of {len(view.nodes)} nodes within {brake.window_s:.0f} s, {allowed} may go"
    domain = _domain(view, verdict.node)
    beside = sum(1 for node in out if domain and _domain(view, node) == domain)
    if beside >= brake.nodes_per_domain:
        return f"{beside} nodes of domain {domain} within {brake.window_s:.0f} s, {brake.nodes_per_domain} may go"
    return None


def _is_out(book: Book, verdict: Verdict) -> bool:
    return any(quarantine.verdict.rule == verdict.rule for quarantine in book.quarantined.get(verdict.node, ()))


def _sees(view: View, node: NodeId) -> bool:
    """An agent that sees no GPU can't say that one is well."""
    return node in view.health and bool(view.health[node].gpus)


def _domain(view: View, node: NodeId) -> str:
    """Nodes without the label are no domain together."""
    return view.nodes[node].labels.get(DOMAIN_LABEL, "") if node in view.nodes else ""


EVICTION_REPEAT_S = 2.0
"""A gang that still names an evicted GPU after this long is told again (the order may have been lost)."""


def _evictions(book: Book, view: View, now_s: float) -> tuple[Evict, ...]:
    """Ranks that stand on a quarantined GPU."""
    moves = []
    for claim in book.claims.values():
        gang = view.gangs.get(claim.id)
        if claim.state not in HOLDING or gang is None or claim.grant is None:
            continue
        marked = [node for node in filter(book.quarantined.__contains__, claim.nodes) if node in view.nodes]
        there = [(node, gpu) for node in marked for gpu in _gpus_at(book, view, node)]
        # The few on marked nodes are looked for among all of the gang's: less work than a set of all of the gang's.
        ranks = {gpu for _, gpu in there}.intersection(gang.gpus if there else ())
        told: set[str] = set()
        for node, gpu in there:
            if gpu not in ranks:
                continue
            held = _leaves_now(book, node, gpu)
            if held is None:
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


def _gpus_at(book: Book, view: View, node: NodeId) -> Iterable[GpuId]:
    """The node's GPUs, and those that stand in verdicts though the driver does not list them any more."""
    named = (quarantine.verdict.gpu for quarantine in book.quarantined[node])
    listed = (gpu.uuid for gpu in gpus_of(view, view.nodes[node]))
    return dict.fromkeys((*(gpu for gpu in named if gpu is not None), *listed))


def _leaves_now(book: Book, node: NodeId, gpu: GpuId) -> Verdict | None:
    """The verdict for which a GPU must leave its gang at once; one against its node goes first."""
    now = [q.verdict for q in standing_on(book, node, gpu) if q.verdict.when is When.NOW]
    return min(now, key=lambda verdict: verdict.action is not Action.EVICT_NODE, default=None)


def _said(move: Move) -> str:
    match move:
        case Impose():
            return f"quarantine {move.verdict.gpu or move.verdict.node}: {move.verdict.evidence}"
        case Brake():
            return f"{move.verdict.gpu or move.verdict.node} stays: {move.reason}"
        case Lift() | Evict():
            return f"{move.kind} {move.gpu or move.node}: {move.reason}"
        case _:
            return move.kind
