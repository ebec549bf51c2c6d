"""One of Ray Train's workers: an actor that holds a node's GPUs and runs the node's agent in a thread.

Nothing here imports torch or Ray Train: of the seconds that a restarted worker group takes, most were imports. So a
run's first workers start while Ray Train's controller, which takes them over, is still being imported.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tidegate.gang.plan import Formation


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Where a worker runs."""

    hostname: str
    node_id: str
    node_ip: str
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """How a worker stands. Has the attributes of Ray Train's `WorkerStatus`, which would have to be imported."""

    running: bool
    error: Exception | None = None
    training_report: None = None
    return_value: None = None
    preemption_info: None = None


class NodeWorker:
    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: str | None = None

    def where(self) -> Where:
        return Where(
            hostname=socket.gethostname(),
            node_id=ray.get_runtime_context().get_node_id(),
            node_ip=ray.util.get_node_ip_address(),
            pid=os.getpid(),
        )

    def run(self, function: Callable[[dict[str, Any]], None], settings: dict[str, Any]) -> None:
        """Start `function(settings)` and return."""

        def body() -> None:
            try:
                function(settings)
            except Exception as error:
                # As text: the controller need not know the class.
                self._error = f"{type(error).__name__}: {error}"

        self._thread = threading.Thread(target=body, name="node-agent", daemon=True)
        self._thread.start()

    def poll_status(self) -> NodeStatus:
        if self._thread is None or self._thread.is_alive():
            return NodeStatus(running=True)
        return NodeStatus(running=False, error=RuntimeError(self._error) if self._error is not None else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """A gang's workers, started and told to run; they end with the process that started them."""

    formation: Formation
    actors: tuple[Any, ...]
    """One a bundle, in the bundles' order."""
    told: tuple[Any, ...]
    """A reference for each: done once its function runs."""


def start_workers(
    group: PlacementGroup, formation: Formation, function: Callable[[dict[str, Any]], None], settings: dict[str, Any]
) -> Workers:
    """Start a worker in each bundle of the formation's group and have it run `function(settings)`; returns at once."""
    actors = [
        ray.remote(NodeWorker)
        .options(
            num_cpus=0,
            num_gpus=formation.gpus_per_node,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
        )
        .remote()
        for bundle in range(formation.nodes)
    ]
    told = [actor.run.remote(function, settings) for actor in actors]
    return Workers(formation=formation, actors=tuple(actors), told=tuple(told))
