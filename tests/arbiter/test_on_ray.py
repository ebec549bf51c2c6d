"""The calls that `arbiter/on_ray.py` makes into Ray 2.60 without Ray's public-API promise, on a real small cluster.

What is left of each node's resources, which nodes drain, the Serve controller's details, its external scaler, and the
names of its replicas. An upgrade that moves or changes one breaks a test here.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
import ray._private.state
import ray._private.worker
from ray import serve
from ray.serve.config import HTTPOptions, ProxyLocation
from starlette.requests import Request

from tidegate.arbiter.book import Book
from tidegate.arbiter.client import NAMESPACE
from tidegate.arbiter.messages import PoolPlan
from tidegate.arbiter.moves import LayPools, SetTarget, StopReplicas
from tidegate.arbiter.on_ray import RayFleet
from tidegate.arbiter.view import PoolSeen
from tidegate.ids import ClaimId, NodeId, PoolName, pool_name, pools_app
from tidegate.ports import free_port
from tidegate.testing.local_cluster import LocalCluster, Ports
from waiting import wait_until

pytestmark = pytest.mark.cluster

APP = "images"
PREEMPTION = 2
"""Ray's `DrainNodeReason`: the one that is never rejected."""
HOLD_LOOKS = 40
"""Looks at a pool that is to stay at zero, one per request that asks for it: the autoscaler would have had its turn."""


class Pool:
    """A replica of one node's pool."""

    def reconfigure(self, config: dict[str, str]) -> None:
        self.plan = config

    async def __call__(self, never_done: str) -> str:
        """`never_done`: a file that says that the work has begun, which then goes on for ever."""
        if never_done:
            Path(never_done).touch()
            await asyncio.Event().wait()
        return "made"


def build_pool(node: NodeId, pool: PoolName, args: Mapping[str, Any]) -> serve.Application:
    options = {"num_cpus": 0, "num_gpus": 1, "label_selector": {"ray.io/node-id": node}}
    pinned = serve.deployment(Pool).options(
        name=pool,
        ray_actor_options=options,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=args["drain_s"],
    )
    app: serve.Application = pinned.bind()
    return app


class Ingress:
    """Asks a pool."""

    def __init__(self, pool: str) -> None:
        self._pool = serve.get_deployment_handle(pool, pools_app(APP))

    async def __call__(self, request: Request) -> str:
        asked = request.query_params
        answer: str = await self._pool.remote(asked.get("never_done", ""))
        return answer


@dataclass(frozen=True)
class Room:
    fleet: RayFleet
    nodes: tuple[NodeId, ...]
    url: str

    def pool(self, which: int) -> PoolSeen:
        return self.fleet.look(Book()).pools[pool_name(self.nodes[which])]

    def set(self, which: int, replicas: int) -> None:
        self.fleet.apply(
            SetTarget(pool=pool_name(self.nodes[which]), replicas=replicas, reason="test", at_s=0.0), Book()
        )

    def lay(self, *nodes: NodeId, version: str = "v1") -> None:
        """A pool for each of these nodes; those that are there keep their targets, new ones are empty."""
        there = self.fleet.look(Book()).pools
        targets = {node: there[pool_name(node)].target if pool_name(node) in there else 0 for node in nodes}
        plan = PoolPlan(builder=f"{__name__}:build_pool", args={"drain_s": 20.0}, version=version, at_s=0.0)
        self.fleet.apply(LayPools(plan=plan, targets=targets, pools=(), reason="test", at_s=0.0), Book())

    def replicas(self) -> set[str]:
        named = ray.util.list_named_actors(all_namespaces=True)
        return {actor["name"] for actor in named if "#pool-" in actor["name"]}

    def free(self) -> list[float]:
        seen = self.fleet.look(Book()).nodes
        return [seen[node].free_gpu_slots for node in self.nodes]


@pytest.fixture(scope="module")
def room() -> Iterator[Room]:
    port = free_port()
    ports = Ports(gcs=free_port(), dashboard=free_port(), serve_http=port)
    with LocalCluster(ports=ports, gpus_per_node=(2, 1), head_cpus=2, node_cpus=1) as cluster:
        ray.init(address=cluster.address, namespace=NAMESPACE, log_to_driver=False)
        # Serve's processes can't import a test.
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        try:
            rows = sorted(
                (row for row in ray.nodes() if row["Resources"].get("GPU")), key=lambda r: r["Labels"]["tidegate/name"]
            )
            nodes = tuple(NodeId(row["NodeID"]) for row in rows)
            serve.start(http_options=HTTPOptions(host="127.0.0.1", port=port), proxy_location=ProxyLocation.HeadOnly)
            # The test's own module is no package: Serve's processes get it by value, `lay_pools` by name.
            room = Room(fleet=RayFleet(app=APP), nodes=nodes, url=f"http://127.0.0.1:{port}/")
            room.lay(nodes[0])
            wait_until(lambda: len(room.fleet.look(Book()).pools) == 1, 60, "the first pool")
            ingress = serve.deployment(Ingress).options(ray_actor_options={"num_cpus": 0}).bind(pool_name(nodes[0]))
            serve.run(ingress, name=APP, route_prefix="/")
            room.set(0, 1)
            yield room
            serve.shutdown()
        finally:
            ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
            ray.shutdown()


def test_a_node_that_joins_gets_an_empty_pool_and_no_other_replica_restarts(room: Room) -> None:
    """An explicit version, and a target of 0 to begin with: neither is in Serve's public API."""
    wait_until(lambda: room.pool(0).running == 1, 60, "the first pool's replica runs")
    before = room.replicas()
    room.lay(*room.nodes)
    wait_until(lambda: len(room.fleet.look(Book()).pools) == 2, 30, "the second pool")
    assert (room.pool(1).target, room.pool(1).holding, room.pool(1).plan) == (0, 0, "v1")
    room.set(1, 1)
    wait_until(lambda: room.pool(1).running == 1, 60, "its replica runs")
    assert before <= room.replicas()


def test_nodes_and_what_is_left_of_them(room: Room) -> None:
    """`ray._private.state.available_resources_per_node`: a replica's GPU is missing on its node, and only there."""
    raw = ray._private.state.available_resources_per_node()
    assert set(room.nodes) <= set(raw), "keys are no longer node ids in hex"
    wait_until(lambda: room.free() == [1.0, 0.0], 30, "one replica has a GPU on each node")
    seen = room.fleet.look(Book()).nodes
    assert [(seen[n].name, seen[n].gpu_slots) for n in room.nodes] == [("node-a", 2), ("node-b", 1)]


def test_pools_as_the_serve_controller_details_them(room: Room) -> None:
    """`get_serve_instance_details`: target and each replica's state."""
    seen = room.fleet.look(Book()).pools
    assert set(seen) == {pool_name(node) for node in room.nodes}, "the ingress is no pool"
    wait_until(lambda: room.pool(0).running == room.pool(1).running == 1, 60, "both replicas run")
    assert room.pool(1) == PoolSeen(
        name=pool_name(room.nodes[1]), target=1, running=1, starting=0, stopping=0, plan="v1"
    )


def test_a_replica_without_a_gpu_is_seen_as_starting(room: Room) -> None:
    """The arbiter counts it as held: it would take a GPU as soon as one is free."""
    room.set(1, 2)
    wait_until(lambda: room.pool(1).starting == 1, 30, "the second replica waits")
    assert (room.pool(1).target, room.pool(1).running, room.pool(1).holding) == (2, 1, 2)
    room.set(1, 1)
    wait_until(lambda: room.pool(1).holding == 1, 30, "the waiting replica is taken back")
    assert room.pool(1).running == 1, "C001: the one that serves stays, the one that waits goes"


def test_the_external_scaler_holds_zero_while_requests_wait(room: Room) -> None:
    """`update_deployment_replicas`: 0 is kept however many requests are queued (Serve's own policies can't do that)."""
    wait_until(lambda: httpx.get(room.url, timeout=30).text == "made", 30, "the app answers")
    room.set(0, 0)
    wait_until(lambda: room.pool(0).holding == 0, 30, "the pool is empty")
    wait_until(lambda: room.free() == [2.0, 0.0], 30, "its GPU is free")
    answers: list[str] = []
    askers = [threading.Thread(target=lambda: answers.append(httpx.get(room.url, timeout=60).text)) for _ in range(8)]
    for asker in askers:
        asker.start()
    looks: list[PoolSeen] = []

    def held() -> bool:
        looks.append(room.pool(0))
        return len(looks) >= HOLD_LOOKS

    wait_until(held, 30, "the pool is watched")
    assert {(pool.target, pool.holding) for pool in looks} == {(0, 0)}
    assert answers == []
    room.set(0, 1)
    wait_until(lambda: len(answers) == len(askers), 60, "the requests are answered once there is a replica")
    assert set(answers) == {"made"}


def test_targets_outlive_the_serve_controller(room: Room) -> None:
    """SIGKILL of the controller: nothing is seen meanwhile, and the target that was set is the one that comes back."""
    room.set(0, 2)
    wait_until(lambda: room.pool(0).running == 2, 60, "two replicas run")
    controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    before = process_of(controller)
    assert before is not None
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: process_of(controller) not in (None, before), 60, "there is a new controller")
    wait_until(lambda: len(room.fleet.look(Book()).pools) == 2, 60, "it has read back what it must know")
    assert (room.pool(0).target, room.pool(0).holding) == (2, 2), "replicas that it recovers count as held"
    wait_until(lambda: room.pool(0).running == 2, 60, "it has found its replicas again")
    room.set(0, 1)
    wait_until(lambda: room.pool(0).holding == 1, 30, "it can be set again")


def process_of(actor: Any) -> int | None:
    """Its process id; None while it restarts."""
    try:
        pid: int = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=5)
    except ray.exceptions.RayError:
        return None
    return pid


def test_what_a_stopping_replica_still_does_can_be_cut_off(room: Room, tmp_path: Path) -> None:
    """C009: `actor_name` in the details: past the drain's deadline the arbiter kills the replica by it."""
    room.set(0, 1)
    wait_until(lambda: room.pool(0).running == 1, 60, "a replica runs")
    errors: list[int] = []
    asked = {"never_done": str(tmp_path / "began")}
    asker = threading.Thread(target=lambda: errors.append(httpx.get(room.url, params=asked, timeout=90).status_code))
    asker.start()
    wait_until((tmp_path / "began").exists, 30, "the replica works on it")
    room.set(0, 0)
    wait_until(lambda: room.pool(0).stopping == 1, 30, "the replica is told to stop, and finishes what it does")
    began_s = time.monotonic()
    stop = StopReplicas(
        claim=ClaimId("run"), pools=(pool_name(room.nodes[0]),), reason="the drain's time is over", at_s=0.0
    )
    room.fleet.apply(stop, Book())
    wait_until(lambda: room.pool(0).holding == 0, 10, "it is gone")
    wait_until(lambda: room.free()[0] == 2.0, 10, "its GPU is free")
    assert time.monotonic() - began_s < 10
    room.fleet.apply(stop, Book())  # told twice, there is nobody left to kill
    asker.join()
    assert errors == [500], "the gateway's part is to have it answered elsewhere"


def test_a_drain_notice_is_seen(room: Room) -> None:
    """C007: `get_draining_nodes`, without a deadline as "some time", then with one. A drain can't be taken back."""
    assert {seen.drains_by_s for seen in room.fleet.look(Book()).nodes.values()} == {None}
    # A node leaves as soon as it is idle: a replica keeps this one.
    wait_until(lambda: room.pool(1).running == 1, 30, "a replica keeps the node")
    by_s = time.time() + 600
    for at_ms, seen_s in ((0, math.inf), (int(1000 * by_s), pytest.approx(by_s, abs=1))):
        assert ray._private.worker.global_worker.gcs_client.drain_node(room.nodes[1], PREEMPTION, "test", at_ms)[0]
        wait_until(lambda want=seen_s: drains(room, 1) == want, 10, f"it is seen to go at {seen_s}")  # type: ignore[misc]
    assert drains(room, 0) is None


def drains(room: Room, which: int) -> float | None:
    return room.fleet.look(Book()).nodes[room.nodes[which]].drains_by_s


def test_an_unknown_pool_is_an_error_and_not_silence(room: Room) -> None:
    """The arbiter writes such a failure into its journal."""
    with pytest.raises(ray.exceptions.RayError):
        room.fleet.apply(SetTarget(pool=PoolName("pool-nowhere"), replicas=1, reason="test", at_s=0.0), Book())


def test_a_pool_of_a_newer_plan_keeps_its_target_and_one_of_a_gone_node_goes(room: Room) -> None:
    room.set(0, 2)
    wait_until(lambda: room.pool(0).running == 2, 60, "two replicas run")
    before = room.replicas()
    assert room.fleet.look(Book()).serves
    room.lay(room.nodes[0], version="v2")
    wait_until(lambda: set(room.fleet.look(Book()).pools) == {pool_name(room.nodes[0])}, 60, "the other pool is gone")
    wait_until(lambda: room.pool(0).running == 2 and not before & room.replicas(), 60, "all replicas are new ones")
    assert (room.pool(0).target, room.pool(0).plan) == (2, "v2")
    room.fleet.apply(LayPools(plan=None, targets={}, pools=(), reason="test", at_s=0.0), Book())
    wait_until(lambda: not room.fleet.look(Book()).pools, 60, "no pool is left")
