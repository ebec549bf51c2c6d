"""Which nodes a gang gets. Pure.

Order of preference (design section 4): most fit GPUs, then the same network domain, then fewest serving replicas to
move. Whole nodes only: a bundle that is smaller than its node would let a replica in beside the gang.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.arbiter.book import Book
from tidegate.arbiter.messages import ClaimSpec
from tidegate.arbiter.view import NodeSeen, View, fit_gpus
from tidegate.ids import NodeId, Tier, pool_name

DOMAIN_LABEL = "tidegate/domain"
"""Node label that names the network domain (rail, rack, NVLink switch); nodes without it share one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    nodes: tuple[NodeId, ...]
    gpus: int
    """Fit to train on, over all nodes."""
    reason: str


def place(view: View, book: Book, spec: ClaimSpec, may_move_serving: bool) -> Placement | None:
    """Nodes for the claim, or None when fewer than `min_gpus` can be had now.

    With `may_move_serving` off only nodes without replicas count.
    """
    candidates = [
        (len(fit_gpus(view, book, node, Tier.GANG)), node)
        for node in view.nodes.values()
        if book.holder_of(node.id) is None and (may_move_serving or _replicas(view, node) == 0)
    ]
    candidates = [(fit, node) for fit, node in candidates if fit > 0]
    # Every bundle of a Ray Train group has the same size, so a gang's nodes do too: take the size that gives most.
    best: Placement | None = None
    for slots in {node.gpu_slots for _, node in candidates}:
        chosen = _of_one_size([(fit, node) for fit, node in candidates if node.gpu_slots == slots], view, spec)
        if best is None or min(chosen.gpus, spec.max_gpus) > min(best.gpus, spec.max_gpus):
            best = chosen
    return best if best is not None and best.gpus >= spec.min_gpus else None


def most_ever(view: View) -> int:
    """GPUs that the largest possible gang would have if everybody left."""
    by_slots: dict[int, int] = {}
    for node in view.nodes.values():
        by_slots[node.gpu_slots] = by_slots.get(node.gpu_slots, 0) + node.gpu_slots
    return max(by_slots.values(), default=0)


def _of_one_size(candidates: list[tuple[int, NodeSeen]], view: View, spec: ClaimSpec) -> Placement:
    in_domain: dict[str, int] = {}
    for fit, node in candidates:
        in_domain[_domain(node)] = in_domain.get(_domain(node), 0) + fit

    def preference(item: tuple[int, NodeSeen]) -> tuple[int, int, str, int, str]:
        fit, node = item
        # A domain that holds the whole gang comes first, the smallest such one, to leave large ones whole.
        room = in_domain[_domain(node)]
        return (-fit, room if room >= spec.max_gpus else 10**9 - room, _domain(node), _replicas(view, node), node.id)

    nodes: list[NodeId] = []
    gpus = 0
    for fit, node in sorted(candidates, key=preference):
        if gpus >= spec.max_gpus:
            break
        nodes.append(node.id)
        gpus += fit
    return Placement(nodes=tuple(nodes), gpus=gpus, reason=f"{len(nodes)} nodes with {gpus} fit GPUs")


def _domain(node: NodeSeen) -> str:
    return node.labels.get(DOMAIN_LABEL, "")


def _replicas(view: View, node: NodeSeen) -> int:
    pool = view.pools.get(pool_name(node.id))
    return pool.holding if pool is not None else 0
