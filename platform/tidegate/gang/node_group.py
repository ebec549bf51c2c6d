"""Ray Train's worker group for a gang: one `NodeWorker` a node, in the placement group that the arbiter holds.

Ray Train's own would bring what a gang has no use for: a training context in each worker, a synchronization actor, the
imports of both, and five seconds of patience with a worker that doesn't answer. `WorkerGroup` is private to Ray 2.60.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError, WorkerGroupStartupTimeoutError
from ray.train.v2._internal.execution.worker_group.placement_group_handle import DefaultPlacementGroupHandle
from ray.train.v2._internal.execution.worker_group.state import WorkerGroupState
from ray.train.v2._internal.execution.worker_group.worker import ActorMetadata, Worker
from ray.train.v2._internal.execution.worker_group.worker_group import WorkerGroup

from tidegate.gang.node_worker import Where, Workers, start_workers
from tidegate.gang.plan import Formation


@dataclass(slots=True)
class Standing:
    """Where the present worker group stands: the scaling policy sets it, the worker group reads it."""

    formation: Formation | None = None
    early: Workers | None = None
    """Workers that were started there before Ray Train was: the first worker group takes them over."""


class BorrowedGroup(DefaultPlacementGroupHandle):
    def shutdown(self) -> None:
        """The arbiter owns the placement group: it stays over restarts."""


class _GroupState(WorkerGroupState):
    def shutdown(self) -> None:
        """Kill at once: agents hold no state, and ranks end with them."""
        _kill([worker.actor for worker in self.workers])
        self.placement_group_handle.shutdown()


def node_group(
    function: Callable[[dict[str, Any]], None], settings: dict[str, Any], standing: Standing
) -> type[WorkerGroup]:
    """A worker group whose workers run `function(settings)` where `standing` says."""

    class NodeGroup(WorkerGroup):
        def __init__(self, train_run_context: Any, worker_group_context: Any, callbacks: Any = None) -> None:
            # Its callbacks serve reports, data sets and contexts of workers: ours have none.
            super().__init__(train_run_context, worker_group_context, callbacks=[])

        def _start_impl(self, worker_group_state_builder: Any) -> None:
            self._assert_inactive()
            formation = standing.formation
            assert formation is not None
            early, standing.early = standing.early, None
            handle = _borrow(formation.group)
            if not handle.wait(self._worker_group_start_timeout_s):
                _kill(early.actors if early is not None else ())
                raise WorkerGroupStartupTimeoutError(num_workers=formation.nodes)
            workers = early or start_workers(handle.placement_group, formation, function, settings)
            actors = workers.actors
            try:
                # No limit here: who never comes is missed by the coordinator (`join_deadline_s`), and it ends us.
                places: list[Where] = ray.get([actor.where.remote() for actor in actors])
                ray.get(list(workers.told))
            except ray.exceptions.RayActorError as error:
                _kill(actors)
                raise WorkerGroupStartupFailedError("a node's worker has died as it started") from error
            resources = {"GPU": float(formation.gpus_per_node)}
            self._worker_rank_to_replica_group_rank = {rank: rank for rank in range(len(actors))}
            self._worker_group_state = _GroupState(
                start_time=time.monotonic(),
                placement_group_handle=handle,
                workers=[
                    Worker(actor, _metadata(place), resources, placement_group_bundle_index=bundle)
                    for bundle, (actor, place) in enumerate(zip(actors, places, strict=True))
                ],
                sync_actor=None,
            )

    return NodeGroup


def _borrow(name: str) -> BorrowedGroup:
    try:
        return BorrowedGroup(ray.util.get_placement_group(name))
    except ValueError as error:  # the arbiter has removed it since
        raise WorkerGroupStartupFailedError(str(error)) from error


def _metadata(place: Where) -> ActorMetadata:
    return ActorMetadata(
        hostname=place.hostname, node_id=place.node_id, node_ip=place.node_ip, pid=place.pid, accelerator_ids={}
    )


def _kill(actors: Sequence[Any]) -> None:
    for actor in actors:
        ray.kill(actor)
