"""Ray Train's data-parallel trainer over nodes that the arbiter holds.

One Train worker per node, in the arbiter's placement group, which outlives the worker group: a restarted group gets
the same nodes and Serve can't slip in between. Two hooks are private to Ray Train 2.60
(`_initialize_and_run_controller` and `TrainController.worker_group_cls`); they stand here and nowhere else, and
`tests/gang/test_trainer.py` breaks loudly when an upgrade moves them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.execution.controller.controller import TrainController
from ray.train.v2._internal.execution.worker_group.placement_group_handle import DefaultPlacementGroupHandle
from ray.train.v2._internal.execution.worker_group.worker_group import WorkerGroup
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from tidegate.arbiter.messages import Grant

POLL_S = 0.5
"""How often Ray Train looks at its workers (its default, 2 s, is most of a node restart's notice)."""


class _BorrowedGroup(DefaultPlacementGroupHandle):
    def shutdown(self) -> None:
        """The arbiter owns the placement group: it stays over restarts."""


def _borrowing_controller(placement_group: str) -> type[TrainController]:
    class BorrowingWorkerGroup(WorkerGroup):
        def _create_placement_group(self, scaling_config: Any, worker_group_context: Any) -> _BorrowedGroup:
            return _BorrowedGroup(ray.util.get_placement_group(placement_group))

    class BorrowingController(TrainController):
        worker_group_cls = BorrowingWorkerGroup

    return BorrowingController


class NodeTrainer(DataParallelTrainer):
    """`fit()` blocks until the gang has ended; Ray Train restarts the whole group when a node's worker dies."""

    def __init__(
        self, train_fn: Callable[[dict[str, Any]], None], settings: dict[str, Any], grant: Grant, run_dir: Path
    ) -> None:
        self._placement_group = grant.placement_group
        super().__init__(
            train_fn,
            train_loop_config=settings,
            scaling_config=ScalingConfig(
                num_workers=len(grant.nodes),
                use_gpu=True,
                resources_per_worker={"GPU": grant.gpus_per_node},
            ),
            run_config=RunConfig(
                name=f"grant-{grant.generation}",
                storage_path=str(run_dir / "ray_train"),
                failure_config=FailureConfig(max_failures=-1),
            ),
        )

    def _initialize_and_run_controller(self, **arguments: Any) -> Any:
        # It would remove the arbiter's placement group when the controller dies.
        arguments["callbacks"] = [
            callback for callback in arguments["callbacks"] if not isinstance(callback, PlacementGroupCleanerCallback)
        ]
        environment = {
            "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": str(POLL_S),
            **{name: value for name, value in os.environ.items() if name.startswith("RAY_TRAIN_")},
        }
        controller = (
            ray.remote(num_cpus=0)(_borrowing_controller(self._placement_group))
            .options(
                runtime_env={"env_vars": environment},
                label_selector={"ray.io/node-id": ray.get_runtime_context().get_node_id()},
            )
            .remote(**arguments)
        )
        ray.get(controller.run.remote())
        return ray.get(controller.get_result.remote())
