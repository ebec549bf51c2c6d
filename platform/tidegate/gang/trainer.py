"""Ray Train's data-parallel trainer over nodes that the arbiter holds.

One Train worker per node, in the arbiter's placement group, which outlives the worker group: a restarted group gets
the same nodes and Serve can't slip in between. At each (re)start of its workers Ray Train asks where: the gang's
current grant may name another group of another size, and so a lost node, a swapped node and a grown gang are one thing.

Hooks private to Ray Train 2.60 (`_initialize_and_run_controller`, `TrainController.worker_group_cls`, the policies' and
the worker group's base classes) stand here and in `node_group.py`, and nowhere else: `tests/gang/test_trainer.py` and
`test_on_cluster.py` break loudly when an upgrade moves them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2._internal.callbacks.metrics import ControllerMetricsCallback
from ray.train.v2._internal.execution.controller.controller import TrainController
from ray.train.v2._internal.execution.failure_handling import FailureDecision, FailurePolicy
from ray.train.v2._internal.execution.scaling_policy import NoopDecision, ResizeDecision, ScalingPolicy
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from tidegate.gang.node_group import Standing, node_group
from tidegate.gang.node_worker import Workers
from tidegate.gang.plan import Ask, NobodyLeadsError

STARTS_APART_S = 1.0
"""At least so long between two starts of the workers: one that fails at once must not spin."""


class _GrantScaling(ScalingPolicy):
    """As many workers as the grant has nodes. Ray's autoscaler is not asked: the arbiter's group is its demand."""

    def __init__(self, scaling_config: ScalingConfig, ask: Ask, standing: Standing) -> None:
        super().__init__(scaling_config)
        self._ask, self._standing, self._started_s = ask, standing, 0.0

    def make_decision_for_non_running_worker_group(self) -> ResizeDecision:
        time.sleep(max(0.0, self._started_s + STARTS_APART_S - time.monotonic()))
        early = self._standing.early
        self._standing.formation = formation = self._ask() if early is None else early.formation
        self._started_s = time.monotonic()
        return ResizeDecision(num_workers=formation.nodes, resources_per_worker={"GPU": formation.gpus_per_node})

    def make_decision_for_running_worker_group(self, worker_group_state: Any, worker_group_status: Any) -> NoopDecision:
        """Nothing: the arbiter moves a gang by removing its group, which ends the workers."""
        return NoopDecision()

    def _get_num_workers_for_resource_request(self) -> int:
        return 0

    def after_controller_start(self, train_run_context: Any) -> None: ...

    async def before_controller_shutdown(self) -> None: ...

    def before_controller_abort(self) -> None: ...


class _KeepGoing(FailurePolicy):
    """Start again, whatever failed: the gang's coordinator knows when to stop."""

    def make_decision(self, training_failed_error: Any) -> FailureDecision:
        cause = getattr(training_failed_error, "controller_failure", None)
        return FailureDecision.RAISE if isinstance(cause, NobodyLeadsError) else FailureDecision.RETRY


class NodeTrainer(DataParallelTrainer):
    """`fit()` blocks until the gang has ended; Ray Train's controller runs in this process, in the calling thread."""

    def __init__(
        self,
        train_fn: Callable[[dict[str, Any]], None],
        settings: dict[str, Any],
        storage: Path,
        name: str,
        ask: Ask,
        early: Workers | None = None,
    ) -> None:
        """
        Args:
            early: workers that run `train_fn(settings)` already.
        """
        self._ask, self._early = ask, early
        super().__init__(
            train_fn,
            train_loop_config=settings,
            # The number of workers is the scaling policy's.
            scaling_config=ScalingConfig(num_workers=1, use_gpu=True),
            run_config=RunConfig(
                name=name,
                storage_path=str(storage),
                failure_config=FailureConfig(max_failures=-1),
            ),
        )

    def _initialize_and_run_controller(self, **arguments: Any) -> Any:
        standing = Standing(early=self._early)
        arguments["scaling_policy"] = _GrantScaling(self.scaling_config, self._ask, standing)
        arguments["failure_policy"] = _KeepGoing(self.run_config.failure_config)
        # The cleaner among them would remove the arbiter's placement group when the controller dies; the others serve
        # workers that ours are not.
        arguments["callbacks"] = [
            callback for callback in arguments["callbacks"] if isinstance(callback, ControllerMetricsCallback)
        ]
        function, settings = self.train_loop_per_worker, self.train_loop_config

        class Controller(TrainController):
            worker_group_cls = node_group(function, settings, standing)

        controller = Controller(**arguments)
        asyncio.run(controller.run())
        return controller.get_result()
