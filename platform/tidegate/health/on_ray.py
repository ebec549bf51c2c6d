"""The health agents as Ray actors: one on each node that has GPUs, kept alive by Ray, reporting to the arbiter."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
from collections.abc import Iterable
from typing import Any

import ray
from ray.util.metrics import Gauge
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tidegate.arbiter.client import NAMESPACE, ON_HEAD, ArbiterClient
from tidegate.arbiter.messages import HealthReport, Verdict
from tidegate.clock import SystemClock
from tidegate.health.agent import HealthAgent, Seen
from tidegate.health.drills import Drill
from tidegate.health.examining import examination
from tidegate.health.memory import FileMemory
from tidegate.health.node_feeds import feeds_of
from tidegate.health.readings import Reading
from tidegate.health.series import HELP, LABELS, Series, XidCount, series_of
from tidegate.health.sources.saying import Every
from tidegate.ids import NodeId, health_agent_name
from tidegate.spec.policy import Policy

logger = logging.getLogger(__name__)

KEEPER_NAME = "health-agents"
LOOK_FOR_NODES_S = 2.0
METERS_EVERY_S = 5.0
"""Prometheus asks seldom, and Ray gathers less often still."""


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
            feeds=feeds_of(policy.health, node),
            reporter=ArbiterClient(),
            memory=FileMemory(policy.health.state_path / f"{health_agent_name(node)}.json"),
            meters=RayMeters(),
            clock=SystemClock(),
            examine=examination(policy.health),
        )
        self._running = asyncio.get_running_loop().create_task(self._agent.run())
        self._running.add_done_callback(_let_it_crash)

    async def set_healthy(self, subject: str) -> None:
        """See `HealthAgent.set_healthy`."""
        self._agent.set_healthy(subject)

    async def drill(self, drill: Drill, subject: str | None, dry_run: bool) -> tuple[Verdict, ...]:
        """See `HealthAgent.drill`."""
        return self._agent.drill(drill, subject, dry_run=dry_run)

    async def hang(self, gpu: str | None, dry_run: bool) -> str:
        """See `HealthAgent.hang`."""
        return self._agent.hang(gpu, dry_run=dry_run)

    async def seen(self) -> Seen:
        """See `HealthAgent.seen`."""
        return self._agent.seen()


def _let_it_crash(running: asyncio.Task[None]) -> None:
    if not running.cancelled():
        # An actor that answers but no longer looks is worse than none: Ray starts a new one.
        logger.critical("health: the agent's loop has ended", exc_info=running.exception())
        os._exit(1)


class RayMeters:
    """`ray_gpu_temperature_celsius` and its kin (`series.py`); what can't be read has no series.

    A Ray gauge has no call to take a value back, so a dead GPU would look cool for a while; but a NaN ends its series
    (seen on Ray 2.60, and tested).
    """

    def __init__(self, every_s: float = METERS_EVERY_S) -> None:
        self._gauges = {name: Gauge(name, HELP[name], LABELS[name]) for name in LABELS}
        self._shown: dict[Series, float] = {}
        self._xids = XidCount()
        self._due = Every(every_s)

    def show(self, report: HealthReport, readings: Iterable[Reading], tick_s: float) -> None:
        kept = list(readings)
        self._xids.take(kept)
        if not self._due.due(report.at_s):
            return
        series = series_of(report, kept, self._xids, tick_s)
        for key in {**self._shown, **series}:
            value = series.get(key, math.nan)
            # What stays the same is said again: seen on Ray 2.60, a gauge that was set once was gone a minute later.
            name, labels = key
            self._gauges[name].set(value, dict(labels))
        self._shown = series
