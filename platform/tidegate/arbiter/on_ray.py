"""The arbiter's eyes and hands on a Ray cluster.

Three of the calls are not under Ray's public-API promise (2.60): the resources left on each node, the Serve
controller's details, and its external scaler without the dashboard. They stand here and nowhere else, and
`tests/arbiter/test_on_ray.py` breaks when an upgrade changes them.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from typing import Any, assert_never

import ray
import ray._private.state
from ray.serve._private.common import DeploymentID
from ray.util.placement_group import PlacementGroup, get_placement_group, placement_group, remove_placement_group

from tidegate.arbiter.book import (
    ENDED,
    Advance,
    Book,
    CreateGroup,
    Evict,
    File,
    Give,
    Impose,
    Lift,
    Move,
    Pardon,
    Probe,
    Publish,
    RemoveGroup,
    Route,
    SetTarget,
)
from tidegate.arbiter.client import NAMESPACE
from tidegate.arbiter.decide import group_name
from tidegate.arbiter.loop import FleetSeen
from tidegate.arbiter.view import GroupState, NodeSeen, PoolSeen
from tidegate.ids import ClaimId, NodeId, PoolName, coordinator_name, health_agent_name, pool_name

log = logging.getLogger(__name__)

CALL_DEADLINE_S = 5.0
NAME_LABEL = "tidegate/name"


@dataclass(slots=True)
class RayFleet:
    app: str
    """The Serve application whose pools are ours."""

    def look(self, book: Book) -> FleetSeen:
        nodes = _gpu_nodes()
        return FleetSeen(
            nodes=nodes,
            pools=_pools(self.app, nodes),
            groups=_groups(book),
            gangs_gone=_gangs_gone(book),
        )

    def apply(self, move: Move, book: Book) -> None:
        match move:
            case SetTarget():
                controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
                deployment = DeploymentID(name=move.pool, app_name=self.app)
                ray.get(
                    controller.update_deployment_replicas.remote(deployment, move.replicas), timeout=CALL_DEADLINE_S
                )
            case CreateGroup():
                name = group_name(book.claims[move.claim])
                if _find_group(name) is None:
                    placement_group(
                        [{"GPU": move.gpus_per_node}] * len(move.nodes),
                        strategy="SPREAD",
                        name=name,
                        lifetime="detached",
                        bundle_label_selector=[{"ray.io/node-id": node} for node in move.nodes],
                    )
            case RemoveGroup():
                group = _find_group(group_name(book.claims[move.claim]))
                if group is not None:
                    remove_placement_group(group)
            case Evict():
                run = book.claims[move.claim].spec.name
                coordinator = ray.get_actor(coordinator_name(run), namespace=NAMESPACE)
                ray.get(
                    coordinator.evict.remote(move.node, move.gpu, move.reason, move.reading_at_s),
                    timeout=CALL_DEADLINE_S,
                )
            case Pardon():
                agent = ray.get_actor(health_agent_name(move.node), namespace=NAMESPACE)
                ray.get(agent.set_healthy.remote(move.gpu or move.node), timeout=CALL_DEADLINE_S)
            case File() | Advance() | Probe() | Route() | Give() | Impose() | Lift() | Publish():
                pass  # these change the book; gateways, runs and replicas fetch what they need from it
            case _:
                assert_never(move)


def _gpu_nodes() -> dict[NodeId, NodeSeen]:
    free = ray._private.state.available_resources_per_node()
    return {
        NodeId(row["NodeID"]): NodeSeen(
            id=NodeId(row["NodeID"]),
            address=row["NodeManagerAddress"],
            gpu_slots=int(row["Resources"]["GPU"]),
            free_gpu_slots=float(free.get(row["NodeID"], {}).get("GPU", 0.0)),
            labels=dict(row["Labels"]),
            name=row["Labels"].get(NAME_LABEL, row["NodeManagerHostname"]),
        )
        for row in ray.nodes()
        if row["Alive"] and row["Resources"].get("GPU", 0) >= 1
    }


def _pools(app: str, nodes: dict[NodeId, NodeSeen]) -> dict[PoolName, PoolSeen]:
    try:
        controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
        details = ray.get(controller.get_serve_instance_details.remote(), timeout=CALL_DEADLINE_S)
    except (ValueError, ray.exceptions.RayError, TimeoutError):
        return {}  # Serve is not running, or its controller restarts: nothing can be set either
    deployments: dict[str, Any] = details["applications"].get(app, {}).get("deployments", {})
    pools = {}
    for node in nodes:
        row = deployments.get(pool_name(node))
        if row is None:
            continue
        states = [str(getattr(replica["state"], "value", replica["state"])) for replica in row["replicas"]]
        running = states.count("RUNNING")
        stopping = states.count("STOPPING")
        pools[pool_name(node)] = PoolSeen(
            name=pool_name(node),
            target=int(row["target_num_replicas"]),
            running=running,
            starting=len(states) - running - stopping,
            stopping=stopping,
        )
    return pools


def _groups(book: Book) -> dict[ClaimId, GroupState]:
    table = ray.util.placement_group_table() if book.claims else {}
    states = {row["name"]: row["state"] for row in table.values() if row["state"] != "REMOVED"}
    return {
        claim.id: GroupState.READY if states[group_name(claim)] == "CREATED" else GroupState.PENDING
        for claim in book.claims.values()
        if group_name(claim) in states
    }


def _gangs_gone(book: Book) -> dict[ClaimId, str]:
    gone = {}
    for claim in book.claims.values():
        if claim.state not in ENDED:
            try:
                ray.get_actor(coordinator_name(claim.spec.name), namespace=NAMESPACE)
            except ValueError:
                gone[claim.id] = "its coordinator is gone"
    return gone


def _find_group(name: str) -> PlacementGroup | None:
    with contextlib.suppress(ValueError):
        return get_placement_group(name)
    return None
