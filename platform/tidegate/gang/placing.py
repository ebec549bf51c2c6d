"""Where a run's own actors stand, and what Ray says about nodes and groups."""

from __future__ import annotations

from typing import Any

import ray

from tidegate.arbiter.messages import Grant
from tidegate.ids import NodeId

NODE_ID = "ray.io/node-id"
HEAD_RESOURCE = "node:__internal_head__"


def away_from_head(off_head: bool, *also: NodeId) -> dict[str, Any]:
    """Options for an actor that should not fall with the head (nor with the nodes in `also`): on another node while
    there is one, first on those without GPUs; on any node else. They hold for each restart of the actor too."""
    alive = [row for row in ray.nodes() if row["Alive"]]
    heads = [row["NodeID"] for row in alive if HEAD_RESOURCE in row["Resources"]] if off_head else []
    avoided = [*heads, *also]
    others = [row for row in alive if row["NodeID"] not in avoided]
    if not avoided or not others:
        return {}
    not_head = {"label_selector": {NODE_ID: f"!in({','.join(avoided)})"}}
    anywhere = {"label_selector": {NODE_ID: "!in(none)"}}
    no_gpus = [row["NodeID"] for row in others if row["Resources"].get("GPU", 0) < 1]
    if no_gpus:
        wanted = {"label_selector": {NODE_ID: f"in({','.join(no_gpus)})"}}
        return {**wanted, "fallback_strategy": [not_head, anywhere]}
    return {**not_head, "fallback_strategy": [anywhere]}


def spare_nodes(grant: Grant, most: int) -> tuple[NodeId, ...]:
    """Live GPU nodes that the grant does not hold, where the gang may stand next."""
    mine = {node.node for node in grant.nodes}
    rows = [row for row in ray.nodes() if row["Alive"] and row["Resources"].get("GPU", 0) >= 1]
    return tuple(NodeId(row["NodeID"]) for row in rows if row["NodeID"] not in mine)[:most]


def is_ready(grant: Grant) -> bool:
    """Whether the grant's placement group stands, on live nodes."""
    try:
        group = ray.util.get_placement_group(grant.placement_group)
    except ValueError:
        return False
    alive = {NodeId(row["NodeID"]) for row in ray.nodes() if row["Alive"]}
    state: str = ray.util.placement_group_table(group)["state"]
    return state == "CREATED" and all(node.node in alive for node in grant.nodes)
