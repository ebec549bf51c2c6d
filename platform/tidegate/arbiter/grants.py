"""What a grant says: which GPUs of which nodes, and what keeps one from being given. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from tidegate.arbiter.claim import Claim, group_name
from tidegate.arbiter.messages import Grant, GrantedNode
from tidegate.arbiter.moves import Give
from tidegate.arbiter.situation import NOTHING, Moves, Situation
from tidegate.arbiter.view import count_fit, fit_gpus, gpus_of, is_out
from tidegate.ids import Generation, GpuId, NodeId, Tier


def gpus_on(s: Situation, claim: Claim, node: NodeId) -> tuple[GpuId, ...]:
    """The GPUs of a node that the claim may train on: those that are fit, and no more than its shape asks for."""
    return fit_gpus(s.view, s.book, s.view.nodes[node], Tier.GANG)[: claim.spec.gpus_per_node]


def fit_on(s: Situation, claim: Claim, node: NodeId) -> int:
    """How many these are."""
    fit = count_fit(s.view, s.book, s.view.nodes[node], Tier.GANG)
    return fit if claim.spec.gpus_per_node is None else min(fit, claim.spec.gpus_per_node)


def fit_on_each(s: Situation, claim: Claim) -> Mapping[NodeId, int]:
    """As `fit_on`, for all nodes of the claim."""
    if claim.spec.gpus_per_node is not None:
        return {node: fit_on(s, claim, node) for node in claim.nodes}
    seen, marked = s.view.nodes, s.book.quarantined.keys() | s.view.telling.keys()
    return {node: fit_on(s, claim, node) if node in marked else seen[node].gpu_slots for node in claim.nodes}


def are_listed(s: Situation, claim: Claim) -> bool:
    """Whether agents have named the GPUs of the claim's nodes. An arbiter that has just come back does not know them
    yet."""
    health, telling = s.view.health, s.view.telling
    return all([node in health and (node not in telling or telling[node].gpus) for node in claim.nodes])


def give(s: Situation, claim: Claim) -> Give:
    """The grant of the claim's present placement group."""
    nodes = tuple(
        GrantedNode(node=node, address=s.view.nodes[node].address, gpus=gpus_on(s, claim, node)) for node in claim.nodes
    )
    return Give(
        claim=claim.id,
        grant=Grant(
            claim=claim.id,
            generation=Generation(s.book.generation + 1),
            placement_group=group_name(claim),
            gpus_per_node=s.view.nodes[claim.nodes[0]].gpu_slots,
            nodes=nodes,
        ),
    )


def give_again(s: Situation, claim: Claim, fit: Mapping[NodeId, int]) -> Moves:
    """A grant of the same placement group where other GPUs are fit now: one has cooled, or is out.

    A node that is to be swapped is left as it was: its gang is told by name to leave it. `fit`: GPUs on each node.
    """
    grant, quarantined = claim.grant, s.book.quarantined
    if grant is None or not are_listed(s, claim):
        return NOTHING
    # Of a node against which nothing stands as many GPUs are the same GPUs.
    if not any(
        [
            node.gpus != gpus_on(s, claim, node.node) and not is_out(s.book, node.node)
            if node.node in quarantined
            else len(node.gpus) != fit[node.node]
            for node in grant.nodes
        ]
    ):
        return NOTHING
    new = give(s, claim)
    had = {gpu for node in grant.nodes for gpu in node.gpus}
    has = {gpu for node in new.grant.nodes for gpu in node.gpus}
    changes = [*(f"{gpu} is fit again" for gpu in sorted(has - had)), *(f"{gpu} is out" for gpu in sorted(had - has))]
    return (new,), f"{claim.spec.name}: {'; '.join(changes)}"


def unknown_memory(s: Situation, claim: Claim) -> str | None:
    """What holds memory on the claim's GPUs though no process is listed there, if anything does (C033)."""
    limit_bytes = s.policy.claims.unknown_memory_max_bytes
    held = [
        f"{gpu.memory_used_bytes / 2**20:.0f} MiB on {gpu.uuid}"
        for node in claim.nodes
        for gpu in gpus_of(s.view, s.view.nodes[node])
        if gpu.processes == 0 and gpu.memory_used_bytes is not None and gpu.memory_used_bytes > limit_bytes
    ]
    return f"memory is taken and no process is listed: {', '.join(held)}" if held else None
