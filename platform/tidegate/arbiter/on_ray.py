"""The arbiter's eyes and hands on a Ray cluster.

Four of the calls are not under Ray's public-API promise (2.60): the resources left on each node, the nodes that drain,
the Serve controller's details, and its external scaler without the dashboard. They stand here and nowhere else, and
`tests/gang/test_on_cluster.py` and `tests/serve/test_serve_cluster.py` break when an upgrade changes them.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from dataclasses import dataclass, field
from typing import Any, assert_never

import ray
import ray._private.state
from ray.serve._private.common import DeploymentID
from ray.util.placement_group import PlacementGroup, get_placement_group, placement_group, remove_placement_group

from tidegate.arbiter.book import Book
from tidegate.arbiter.claim import GROUP_PREFIX, group_name
from tidegate.arbiter.client import NAMESPACE
from tidegate.arbiter.loop import FleetSeen
from tidegate.arbiter.moves import (
    Advance,
    Brake,
    CreateGroup,
    Evict,
    File,
    Give,
    Impose,
    Join,
    LayPools,
    Lift,
    Move,
    Pardon,
    Probe,
    Publish,
    Release,
    RemoveGroup,
    Route,
    SetTarget,
    Shed,
    Spend,
    StopReplicas,
    Unbrake,
)
from tidegate.arbiter.pools_on_serve import PLAN, lay_pools, take_pools_away
from tidegate.arbiter.view import GroupState, NodeSeen, PoolSeen
from tidegate.ids import (
    POOL_PREFIX,
    ClaimId,
    NodeId,
    PoolName,
    coordinator_name,
    health_agent_name,
    pool_name,
    pools_app,
)

log = logging.getLogger(__name__)

CALL_DEADLINE_S = 5.0
GANG_GONE_AFTER_S = 5.0
"""A coordinator that Ray has not known for this long is gone. One that restarts keeps its name and is not."""
NAME_LABEL = "tidegate/name"


@dataclass(slots=True)
class RayFleet:
    app: str
    """The Serve application whose pools are ours."""
    _missed_since_s: dict[ClaimId, float] = field(init=False, default_factory=dict)
    """Claims without a coordinator, and since when (monotonic clock)."""

    def look(self, book: Book) -> FleetSeen:
        nodes = _gpu_nodes()
        groups, leaked = _groups(book)
        pools, strays, serves = _pools(self.app, nodes)
        return FleetSeen(
            nodes=nodes,
            pools=pools,
            strays=strays,
            serves=serves,
            groups=groups,
            leaked=leaked,
            gangs_gone=self._gangs_gone(book),
        )

    def apply(self, move: Move, book: Book) -> None:
        match move:
            case SetTarget():
                controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
                deployment = DeploymentID(name=move.pool, app_name=pools_app(self.app))
                ray.get(
                    controller.update_deployment_replicas.remote(deployment, move.replicas), timeout=CALL_DEADLINE_S
                )
            case LayPools():
                if move.plan is None:
                    take_pools_away(self.app)
                else:
                    lay_pools(self.app, move.plan, move.targets)
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
                group = _find_group(move.group or group_name(book.claims[move.claim]))
                if group is not None:
                    remove_placement_group(group)
            case Evict():
                run = book.claims[move.claim].spec.name
                coordinator = ray.get_actor(coordinator_name(run), namespace=NAMESPACE)
                order = (move.node, move.gpu, move.reason, move.reading_at_s)
                saving = {} if move.save_by_s is None else {"save_by_s": move.save_by_s}
                ray.get(coordinator.evict.remote(*order, **saving), timeout=CALL_DEADLINE_S)
            case StopReplicas():
                for name in _stopping_replicas(self.app, move.pools):
                    with contextlib.suppress(ValueError):  # it has ended meanwhile
                        ray.kill(ray.get_actor(name, namespace="serve"))
            case Pardon():
                agent = ray.get_actor(health_agent_name(move.node), namespace=NAMESPACE)
                ray.get(agent.set_healthy.remote(move.gpu or move.node), timeout=CALL_DEADLINE_S)
            case File() | Release() | Advance() | Join() | Probe() | Route() | Give() | Impose() | Lift() | Publish():
                pass  # these change the book; gateways, runs and replicas fetch what they need from it
            case Brake() | Unbrake() | Spend() | Shed():
                pass  # likewise
            case _:
                assert_never(move)

    def _gangs_gone(self, book: Book) -> dict[ClaimId, str]:
        now_s = time.monotonic()
        missed: dict[ClaimId, float] = {}
        for claim in book.open_claims():
            try:
                ray.get_actor(coordinator_name(claim.spec.name), namespace=NAMESPACE)
            except ValueError:
                missed[claim.id] = self._missed_since_s.get(claim.id, now_s)
        self._missed_since_s = missed
        return {
            claim: "its coordinator is gone"
            for claim, since_s in missed.items()
            if now_s - since_s >= GANG_GONE_AFTER_S
        }


def _gpu_nodes() -> dict[NodeId, NodeSeen]:
    free = ray._private.state.available_resources_per_node()
    # Milliseconds since the epoch; 0 = the node goes at some time.
    drains = {node: at_ms / 1000.0 or math.inf for node, at_ms in ray._private.state.state.get_draining_nodes().items()}
    return {
        NodeId(row["NodeID"]): NodeSeen(
            id=NodeId(row["NodeID"]),
            address=row["NodeManagerAddress"],
            gpu_slots=int(row["Resources"]["GPU"]),
            free_gpu_slots=float(free.get(row["NodeID"], {}).get("GPU", 0.0)),
            labels=dict(row["Labels"]),
            name=row["Labels"].get(NAME_LABEL, row["NodeManagerHostname"]),
            drains_by_s=drains.get(row["NodeID"]),
        )
        for row in ray.nodes()
        if row["Alive"] and row["Resources"].get("GPU", 0) >= 1
    }


def _apps() -> dict[str, dict[str, Any]]:
    """What Serve's controller has: application -> deployment -> its details. None where it is away."""
    try:
        controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
        details = ray.get(controller.get_serve_instance_details.remote(), timeout=CALL_DEADLINE_S)
    except (ValueError, ray.exceptions.RayError, TimeoutError):
        return {}  # not running, or its controller restarts: nothing can be set either
    return {name: app["deployments"] for name, app in details["applications"].items()}


def _state(replica: dict[str, Any]) -> str:
    return str(getattr(replica["state"], "value", replica["state"]))


def _pools(app: str, nodes: dict[NodeId, NodeSeen]) -> tuple[dict[PoolName, PoolSeen], frozenset[PoolName], bool]:
    """The pools of live nodes, those of others, and whether the application that they are for is there."""
    apps = _apps()
    rows = apps.get(pools_app(app), {})
    pools = {}
    for node in nodes:
        row = rows.get(pool_name(node))
        if row is None:
            continue
        states = [_state(replica) for replica in row["replicas"]]
        running = states.count("RUNNING")
        stopping = states.count("STOPPING")
        pools[pool_name(node)] = PoolSeen(
            name=pool_name(node),
            target=int(row["target_num_replicas"]),
            running=running,
            starting=len(states) - running - stopping,
            stopping=stopping,
            plan=str((row["deployment_config"].get("user_config") or {}).get(PLAN, "")),
        )
    strays = frozenset(PoolName(name) for name in rows if name.startswith(POOL_PREFIX) and name not in pools)
    return pools, strays, app in apps


def _stopping_replicas(app: str, pools: tuple[PoolName, ...]) -> list[str]:
    """Names of the replica actors that were told to stop and have not."""
    deployments = _apps().get(pools_app(app), {})
    rows = [row for pool in pools for row in deployments.get(pool, {"replicas": ()})["replicas"]]
    return [row["actor_name"] for row in rows if _state(row) == "STOPPING" and row["actor_name"]]


def _groups(book: Book) -> tuple[dict[ClaimId, GroupState], dict[str, ClaimId]]:
    """The claims' groups of their present attempts, and those of ours that no claim stands on any more."""
    table = ray.util.placement_group_table()
    states = {row["name"]: row["state"] for row in table.values() if row["state"] != "REMOVED"}
    newest = {group_name(claim): claim.id for claim in book.claims.values()}
    groups: dict[ClaimId, GroupState] = {}
    leaked: dict[str, ClaimId] = {}
    for name, state in states.items():
        if name in newest:
            # RESCHEDULING: a bundle's node has died, and the selector lets no other take its place.
            groups[newest[name]] = GroupState.READY if state == "CREATED" else GroupState.PENDING
        elif name.startswith(GROUP_PREFIX):
            leaked[name] = ClaimId(name.removeprefix(GROUP_PREFIX).rpartition("-")[0])
    return groups, leaked


def _find_group(name: str) -> PlacementGroup | None:
    with contextlib.suppress(ValueError):
        return get_placement_group(name)
    return None
