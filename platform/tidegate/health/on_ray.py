"""The health agents as Ray actors: one on each node that has GPUs, kept alive by Ray, reporting to the arbiter."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
from typing import Any

import ray
from ray.util.metrics import Gauge
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tidegate.arbiter.client import NAMESPACE, ON_HEAD, ArbiterClient
from tidegate.arbiter.messages import HealthReport
from tidegate.clock import SystemClock
from tidegate.health.agent import HealthAgent
from tidegate.health.memory import FileMemory
from tidegate.health.sources.nvml import NvmlSource
from tidegate.ids import GpuId, NodeId, health_agent_name
from tidegate.spec.policy import Policy

logger = logging.getLogger(__name__)

KEEPER_NAME = "health-agents"
LOOK_FOR_NODES_S = 2.0


def keep_agents(policy: Policy) -> Any:
    """The actor that gives each node with GPUs its agent, those that join later too; started if there is none."""
    return (
        ray.remote(AgentsKeeper)
        .options(
            name=KEEPER_NAME,
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            num_cpus=0,
            max_restarts=-1,
            resources=ON_HEAD,
        )
        .remote(policy)
    )


def start_agents(policy: Policy) -> int:
    """See that each live node with GPUs has its agent; how many such nodes there are."""
    nodes = gpu_nodes()
    for node in nodes:
        ensure_agent(node, policy)
    return len(nodes)


def gpu_nodes() -> frozenset[NodeId]:
    return frozenset(NodeId(n["NodeID"]) for n in ray.nodes() if n["Alive"] and n["Resources"].get("GPU", 0) > 0)


def ensure_agent(node: NodeId, policy: Policy) -> Any:
    """The handle of the node's agent; started now if there is none. It does not wait for the start."""
    return (
        ray.remote(HealthActor)
        .options(
            name=health_agent_name(node),
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            num_cpus=0,
            max_restarts=-1,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        .remote(policy)
    )


class AgentsKeeper:
    """Starts agents as nodes join. An agent's own restarts are Ray's business; one whose node is gone ends with it."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._known: frozenset[NodeId] = frozenset()
        threading.Thread(target=self._keep, name="health-agents", daemon=True).start()

    def agents(self) -> int:
        """How many nodes have been given theirs."""
        return len(self._known)

    def _keep(self) -> None:
        rest = threading.Event()
        said = ""
        while True:
            try:
                nodes = gpu_nodes()
                for node in sorted(nodes - self._known):
                    ensure_agent(node, self._policy)
                for node in sorted(self._known - nodes):
                    _forget_agent(node)
                self._known, said = nodes, ""
            except Exception as error:
                # GCS is away for a moment, or a node has gone between two calls: the next look decides afresh.
                if str(error) != said:
                    logger.warning("health: cannot look for new nodes: %s", error)
                said = str(error)
            rest.wait(LOOK_FOR_NODES_S)


def _forget_agent(node: NodeId) -> None:
    """A node never comes back under its id, yet Ray would wait for it with this actor for ever."""
    try:
        ray.kill(ray.get_actor(health_agent_name(node), namespace=NAMESPACE))
    except ValueError:
        return  # Ray has forgotten it already


class HealthActor:
    """The agent of the node that this actor was put on."""

    def __init__(self, policy: Policy) -> None:
        node = NodeId(ray.get_runtime_context().get_node_id())
        self._agent = HealthAgent(
            node=node,
            spec=policy.health,
            source=NvmlSource(policy.health.nvml_library, node=node),
            reporter=ArbiterClient(),
            memory=FileMemory(policy.health.state_path / f"{health_agent_name(node)}.json"),
            meters=RayMeters(),
            clock=SystemClock(),
        )
        self._running = asyncio.get_running_loop().create_task(self._agent.run())
        self._running.add_done_callback(_let_it_crash)

    async def set_healthy(self, subject: str) -> None:
        """See `HealthAgent.set_healthy`."""
        self._agent.set_healthy(subject)


def _let_it_crash(running: asyncio.Task[None]) -> None:
    if not running.cancelled():
        # An actor that answers but no longer looks is worse than none: Ray starts a new one.
        logger.critical("health: the agent's loop has ended", exc_info=running.exception())
        os._exit(1)


class RayMeters:
    """`ray_gpu_temperature_celsius` and its kin; what can't be read has no series, rather than an old one or a 0.

    A Ray gauge repeats its last value for as long as its process lives and has no call to take it back, so a dead GPU
    would look cool for ever; but a NaN ends its series (seen on Ray 2.60, and tested).
    """

    def __init__(self) -> None:
        self._celsius = Gauge("gpu_temperature_celsius", "Core temperature of a GPU.", ("node", "gpu_uuid"))
        self._tensor = Gauge(
            "gpu_tensor_active_ratio", "Share of time in which a GPU's tensor cores work.", ("node", "gpu_uuid")
        )
        self._tick = Gauge("health_tick_seconds", "Time that one look at a node's GPUs takes.", ("node",))
        self._shown: dict[tuple[Gauge, GpuId], float] = {}

    def show(self, report: HealthReport, tick_s: float) -> None:
        values = {(self._celsius, gpu.uuid): gpu.temperature_celsius for gpu in report.gpus}
        values |= {(self._tensor, gpu.uuid): gpu.tensor_active_ratio for gpu in report.gpus}
        readable = {key: value for key, value in values.items() if value is not None}
        for key in {**self._shown, **readable}:
            gauge, uuid = key
            value = readable.get(key, math.nan)
            # It repeats the last value by itself, so only what changes costs anything.
            if value != self._shown.get(key):
                gauge.set(value, {"node": report.node, "gpu_uuid": uuid})
        self._shown = readable
        self._tick.set(tick_s, {"node": report.node})
