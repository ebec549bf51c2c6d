"""Which nodes a gang gets. Pure, and linear in the nodes but for the sorting of those that are chosen from.

Order of preference (design section 4): nodes that the gang has already, then most fit GPUs (fewest findings that the
fleet brake holds back), then the network domain, then fewest serving replicas to move, then least training work lost.
Whole nodes only: a bundle that is smaller than its node would let a replica in beside the gang.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from tidegate.arbiter.book import Book
from tidegate.arbiter.claim import Claim
from tidegate.arbiter.messages import ClaimSpec
from tidegate.arbiter.view import DOMAIN_LABEL, NodeSeen, PoolSeen, View, count_fit
from tidegate.ids import ClaimId, NodeId, Tier, pool_name

ALL = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    nodes: tuple[NodeId, ...]
    gpus: int
    """Fit to train on, over all nodes."""
    reason: str


_Row: TypeAlias = tuple[int, float, NodeId, int, bool]
"""A node that can be had: its replicas, the work lost there and its id (the order of preference); replicas that run,
and whether it serves."""


class _Rank(NamedTuple):
    """What makes nodes of one size equal but for their replicas and their work."""

    slots: int
    fit: int
    suspected: int
    """Findings on each that the fleet brake holds back."""
    domain: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chosen:
    nodes: tuple[NodeId, ...]
    fit: int
    suspected: int
    replicas: int
    lost_s: float


def place(
    view: View,
    book: Book,
    spec: ClaimSpec,
    may_move_serving: bool,
    *,
    taking_from: Collection[ClaimId] = (),
    keep: Sequence[NodeId] = (),
    barred: Collection[NodeId] = (),
    floor_replicas: int = 0,
    now_s: float = 0.0,
) -> Placement | None:
    """Nodes for the claim, or None when fewer than `min_gpus` can be had now.

    Args:
        may_move_serving: off: only nodes without replicas count.
        taking_from: nodes of these claims count as if they were free; which of them lose least is known from what their
            gangs have committed by `now_s`.
        keep: nodes that the gang has; they come first, and others must suit them.
        barred: nodes that are not to be had now.
        floor_replicas: so many must go on running on the nodes that nobody holds.
    """
    taken = {*keep, *barred, *view.unheard}
    lost_s: dict[NodeId, float] = {}
    for claim in book.claims.values():
        if claim.id in taking_from:
            lost_s |= dict.fromkeys(claim.held, work_lost_s(view, claim, now_s))
        else:
            taken.update(claim.held)
    most = spec.gpus_per_node or ALL
    mine = sum(min(count_fit(view, book, view.nodes[node], Tier.GANG), most) for node in keep)
    free = [node for node in view.nodes.values() if node.drains_by_s is None and node.id not in taken]
    slots_left = sum([node.gpu_slots for node in free])
    if mine + slots_left < spec.min_gpus:  # the usual case of a claim that waits, and quickly seen
        return None
    pools = list(map(view.pools.get, map(pool_name, [node.id for node in free])))
    groups: dict[tuple[int, str], dict[_Rank, list[int]]] = {}
    for rank, indexes in _ranked(view, book, free, pools, lost_s).items():
        if rank.fit >= (spec.gpus_per_node or 1):
            groups.setdefault(_group(rank.slots, rank.domain, spec), {})[rank] = indexes
    if keep:
        first = view.nodes[keep[0]]
        own = _group(first.gpu_slots, _domain(first), spec)
        groups = {own: groups.get(own, {})}

    def details(indexes: Iterable[int]) -> list[_Row]:
        return [
            (pool.holding, lost_s.get(node, 0.0), node, pool.running, node not in lost_s)
            if pool is not None
            else (0, lost_s.get(node, 0.0), node, 0, False)
            for node, pool in [(free[index].id, pools[index]) for index in indexes]
        ]

    may_leave = _running_unheld(view, book) - floor_replicas if floor_replicas > 0 else ALL
    choices = [
        (group, _choose(ranks, details, spec, mine, may_leave, may_move_serving)) for group, ranks in groups.items()
    ]
    fitting = [(group, chosen) for group, chosen in choices if mine + chosen.fit >= spec.min_gpus]
    if not fitting:
        return None

    def preference(choice: tuple[tuple[int, str], _Chosen]) -> tuple[int, int, int, int, float, int, str]:
        """Among node sizes (and domains, where one must hold the gang): most GPUs, then as among nodes."""
        (slots, domain), chosen = choice
        ranks = groups[slots, domain]
        room = sum(min(rank.fit, most) * len(indexes) for rank, indexes in ranks.items()) if spec.one_domain else 0
        gpus = min(mine + chosen.fit, spec.max_gpus)
        return (-gpus, chosen.suspected, room, chosen.replicas, chosen.lost_s, slots, domain)

    _, best = min(fitting, key=preference)
    ids, gpus = (*keep, *best.nodes), mine + best.fit
    return Placement(nodes=ids, gpus=gpus, reason=f"{len(ids)} nodes with {gpus} fit GPUs")


def most_ever(view: View, spec: ClaimSpec | None = None) -> int:
    """GPUs that the largest possible gang of the claim's shape would have if everybody left and all were well."""
    by_group: Counter[tuple[int, str]] = Counter()
    for node in view.nodes.values():
        if spec is None or node.gpu_slots >= (spec.gpus_per_node or 1):
            domain = _domain(node) if spec is not None and spec.one_domain else ""
            shape = spec.gpus_per_node if spec is not None else None
            by_group[node.gpu_slots, domain] += shape or node.gpu_slots
    return max(by_group.values(), default=0)


def work_lost_s(view: View, claim: Claim, now_s: float) -> float:
    """GPU-seconds of a claim's work that are in no checkpoint yet: what is lost when its nodes are taken unsaved."""
    gang = view.gangs.get(claim.id)
    if gang is None:
        return 0.0
    since_s = gang.committed_at_s if gang.committed_at_s is not None else claim.since_s
    return max(0.0, now_s - since_s) * gang.world_size


def _ranked(
    view: View, book: Book, nodes: Sequence[NodeSeen], pools: Sequence[PoolSeen | None], held: Collection[NodeId]
) -> dict[_Rank, list[int]]:
    """Those of the nodes on which a group could form, as indexes; those `held` by claims are taken from. It looks at
    most nodes of the cluster, so it does little for each."""
    suspected = Counter(node for node, _, _ in book.held_back)
    marked = {*book.quarantined, *suspected, *view.telling}
    ranked: defaultdict[tuple[int, int, int, str], list[int]] = defaultdict(list)
    for index, (node, pool) in enumerate(zip(nodes, pools, strict=True)):
        slots = node.gpu_slots
        used = slots - node.free_gpu_slots
        if used > 0 and (pool is None or used > pool.holding) and node.id not in held:
            continue  # by others than our replicas
        if node.id in marked:
            fit, findings = count_fit(view, book, node, Tier.GANG), suspected[node.id]
            ranked[slots, fit, findings, node.labels.get(DOMAIN_LABEL, "")].append(index)
        else:
            ranked[slots, slots, 0, node.labels.get(DOMAIN_LABEL, "")].append(index)
    return {_Rank(*rank): indexes for rank, indexes in ranked.items()}


def _choose(
    ranks: Mapping[_Rank, list[int]],
    details: Callable[[Iterable[int]], list[_Row]],
    spec: ClaimSpec,
    mine: int,
    may_leave: int,
    may_move_serving: bool,
) -> _Chosen:
    """The best of these nodes, until the claim has its fill of GPUs. `may_leave` replicas may stop running for it."""
    most = spec.gpus_per_node or ALL
    room: dict[str, int] = {}
    for rank, indexes in ranks.items():
        room[rank.domain] = room.get(rank.domain, 0) + min(rank.fit, most) * len(indexes)

    def preference(rank: _Rank) -> tuple[int, int, int, str]:
        # A domain that holds the whole gang comes first, the smallest such one, to leave large ones whole.
        here = room[rank.domain]
        return (-min(rank.fit, most), rank.suspected, here if here >= spec.max_gpus else ALL - here, rank.domain)

    chosen: list[_Row] = []
    fit = suspected = 0
    for rank in sorted(ranks, key=preference):
        each, short = min(rank.fit, most), spec.max_gpus - mine - fit
        if short <= 0:
            break
        rows = _takeable(sorted(details(ranks[rank])), -(-short // each), may_leave, may_move_serving)
        chosen += rows
        fit += each * len(rows)
        suspected += rank.suspected * len(rows)
        may_leave -= sum([running for _, _, _, running, _ in rows])
    return _Chosen(
        nodes=tuple([node for _, _, node, _, _ in chosen]),
        fit=fit,
        suspected=suspected,
        replicas=sum([replicas for replicas, _, _, _, _ in chosen]),
        lost_s=sum([work_s for _, work_s, _, _, _ in chosen], 0.0),
    )


def _takeable(rows: list[_Row], wanted: int, may_leave: int, may_move_serving: bool) -> list[_Row]:
    """The first `wanted` of these that may be had."""
    first = rows[:wanted]
    if may_move_serving and sum([running for _, _, _, running, _ in first]) <= may_leave:
        return first  # the usual case
    taken: list[_Row] = []
    for row in rows:
        if len(taken) == wanted:
            break
        replicas, _, _, running, serves = row
        if (serves and running > may_leave) or (replicas > 0 and not may_move_serving):
            continue
        taken.append(row)
        may_leave -= running
    return taken


def _running_unheld(view: View, book: Book) -> int:
    """Replicas that run on nodes which no claim holds."""
    held = [pool.running for pool in map(view.pools.get, book.held_pools) if pool is not None]
    return sum([pool.running for pool in view.pools.values()]) - sum(held)


def _group(slots: int, domain: str, spec: ClaimSpec) -> tuple[int, str]:
    """Nodes that one gang can stand on: of one size (every bundle of a Ray Train group has the same), and of one domain
    where that is asked for."""
    return slots, domain if spec.one_domain else ""


def _domain(node: NodeSeen) -> str:
    """Nodes without the label share one domain."""
    return node.labels.get(DOMAIN_LABEL, "")


def nodes_wanted(spec: ClaimSpec, slots: int) -> int:
    """Nodes of `slots` GPUs that a gang has when it has its fill and all is well."""
    return -(-spec.max_gpus // min(slots, spec.gpus_per_node or slots))
