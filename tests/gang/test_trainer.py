"""What `gang/trainer.py` and `gang/node_group.py` lean on inside Ray Train 2.60 and Ray does not promise. No cluster.

An upgrade that moves one of these hooks breaks a line here, each with the reason why we need it; that the hooks also do
what we think is seen on a cluster, in `test_on_cluster.py` and `test_ray_traps.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2._internal import constants
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError
from ray.train.v2._internal.execution.controller.controller import TrainController
from ray.train.v2._internal.execution.failure_handling import FailureDecision, FailurePolicy
from ray.train.v2._internal.execution.scaling_policy import NoopDecision, ResizeDecision, ScalingPolicy
from ray.train.v2._internal.execution.worker_group.placement_group_handle import DefaultPlacementGroupHandle
from ray.train.v2._internal.execution.worker_group.poll import WorkerStatus
from ray.train.v2._internal.execution.worker_group.state import WorkerGroupState
from ray.train.v2._internal.execution.worker_group.worker import ActorMetadata, RayTrainWorker, Worker
from ray.train.v2._internal.execution.worker_group.worker_group import WorkerGroup
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.train.v2.api.exceptions import ControllerError

from tidegate.gang import trainer
from tidegate.gang.host import SETTINGS
from tidegate.gang.node_group import Standing
from tidegate.gang.node_worker import NodeStatus, NodeWorker, Workers
from tidegate.gang.plan import Formation, NobodyLeadsError
from tidegate.gang.trainer import NodeTrainer

CONTROLLER_ARGUMENTS = {"train_fn_ref", "scaling_policy", "failure_policy", "train_run_context", "callbacks"}


def words(function: Callable[..., Any]) -> set[str]:
    """Names and words that a function's code mentions, its inner functions' too."""
    assert isinstance(function, FunctionType)
    found: set[str] = set()
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        found |= {*code.co_names, *code.co_varnames}
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                codes.append(constant)
            elif isinstance(constant, str):
                found.add(constant)
            elif isinstance(constant, tuple):
                found |= {part for part in constant if isinstance(part, str)}
    return found


def calling(owner: type, name: str) -> list[str]:
    """The methods of a class that mention `name`."""
    return [method for method, f in vars(owner).items() if isinstance(f, FunctionType) and name in words(f)]


def parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_fit_starts_its_controller_through_the_method_that_we_override() -> None:
    said = words(DataParallelTrainer.fit)
    assert "_initialize_and_run_controller" in said
    assert said >= CONTROLLER_ARGUMENTS, "what we replace among the controller's arguments has another name"
    taken = inspect.signature(DataParallelTrainer._initialize_and_run_controller).parameters.values()
    assert [parameter.kind for parameter in taken][1:] == [inspect.Parameter.VAR_KEYWORD]
    assert NodeTrainer._initialize_and_run_controller is not DataParallelTrainer._initialize_and_run_controller
    assert NodeTrainer.fit is DataParallelTrainer.fit


def test_the_controller_is_what_we_make_an_actor_of() -> None:
    assert set(parameters(TrainController.__init__)) >= CONTROLLER_ARGUMENTS
    assert inspect.iscoroutinefunction(TrainController.run)
    assert parameters(TrainController.run) == ["self"]
    assert parameters(TrainController.get_result) == ["self"]
    assert inspect.isclass(TrainController), "it is decorated as an actor already"


def test_the_controller_takes_its_worker_group_from_a_class_attribute() -> None:
    assert TrainController.worker_group_cls is WorkerGroup
    assert "worker_group_cls" in words(TrainController._start_worker_group)


def test_a_worker_group_starts_in_one_method() -> None:
    """Ours starts other workers there, in a group that stands already; the rest of the class polls and ends them."""
    assert parameters(WorkerGroup._start_impl) == ["self", "worker_group_state_builder"]
    assert calling(WorkerGroup, "_start_impl"), "it is started otherwise"
    assert parameters(WorkerGroup.__init__) == ["self", "train_run_context", "worker_group_context", "callbacks"]
    assert parameters(WorkerGroup._assert_inactive) == ["self"]
    said = words(WorkerGroup.__init__)
    assert {"_worker_group_start_timeout_s", "_worker_rank_to_replica_group_rank", "_worker_group_state"} <= said
    for ends in (WorkerGroup.shutdown, WorkerGroup.abort):
        assert words(ends) >= {"_worker_group_state", "shutdown"}, "workers are ended by another than their state"


def test_what_a_worker_group_keeps_of_its_workers() -> None:
    assert fields(WorkerGroupState) == {"start_time", "placement_group_handle", "workers", "sync_actor"}
    assert {"actor", "metadata", "resources", "placement_group_bundle_index"} <= fields(Worker)
    assert fields(ActorMetadata) == {"hostname", "node_id", "node_ip", "pid", "accelerator_ids"}


def test_a_worker_is_asked_for_nothing_but_its_status_once_it_runs() -> None:
    """Ours is no `RayTrainWorker`: what Ray asks of it must be there, and its answer look like Ray's."""
    public = {name for name in vars(RayTrainWorker) if not name.startswith("__")}
    asked = public & words(WorkerGroup._get_poll_tasks)
    assert asked == {"poll_status"}
    assert asked <= set(vars(NodeWorker))
    assert fields(WorkerStatus) <= fields(NodeStatus)


def fields(dataclass: Any) -> set[str]:
    return set(dataclass.__dataclass_fields__)


def test_a_placement_group_goes_only_through_its_handle() -> None:
    """So a handle whose `shutdown` does nothing is one that only borrows. Trap 1 needs `wait` to have a timeout."""
    assert "remove_placement_group" in words(DefaultPlacementGroupHandle.shutdown)
    assert parameters(DefaultPlacementGroupHandle.wait) == ["self", "timeout_seconds"]
    assert parameters(DefaultPlacementGroupHandle.__init__) == ["self", "pg"]
    for name, function in vars(WorkerGroup).items():
        if isinstance(function, FunctionType):
            assert "remove_placement_group" not in words(function), name


def test_the_cleaner_that_would_delete_a_borrowed_group_is_a_callback_that_we_can_leave_out() -> None:
    """Trap 7."""
    assert "PlacementGroupCleanerCallback" in words(DataParallelTrainer._create_default_callbacks)
    assert "register_placement_group" in words(PlacementGroupCleanerCallback.after_worker_group_start)
    elsewhere = words(TrainController.__init__) | words(TrainController._start) | words(WorkerGroup.__init__)
    assert not {word for word in elsewhere if "PlacementGroupCleaner" in word}, "it comes in by another door"


def test_a_scaling_policy_decides_how_many_workers_each_start_has() -> None:
    """Trap 2: ours counts the grant's nodes, Ray's elastic one whatever GPUs exist, used by others or not."""
    assert calling(TrainController, "make_decision_for_non_running_worker_group")
    assert calling(TrainController, "make_decision_for_running_worker_group")
    assert list(ResizeDecision.__dataclass_fields__)[:2] == ["num_workers", "resources_per_worker"]
    assert not NoopDecision.__dataclass_fields__
    wanted = {"make_decision_for_non_running_worker_group", "make_decision_for_running_worker_group"}
    assert wanted <= set(ScalingPolicy.__abstractmethods__)
    ours = policies()["_GrantScaling"]
    assert not ours.__abstractmethods__, "Ray asks a policy for more than it did"
    # Ray's own would tell its autoscaler to count these GPUs twice: the arbiter's group is the demand.
    for name in ("after_controller_start", "before_controller_shutdown", "before_controller_abort"):
        assert getattr(ScalingPolicy, name) is not getattr(ours, name)


def test_workers_that_started_early_are_taken_over_once() -> None:
    """The first worker group stands where they do; later ones, or one whose group was lost meanwhile, ask."""
    early = Formation(group="one", nodes=3, gpus_per_node=8)
    now = Formation(group="two", nodes=2, gpus_per_node=4)
    standing = Standing(early=Workers(formation=early, actors=(), told=()))
    policy = policies()["_GrantScaling"](ScalingConfig(num_workers=1, use_gpu=True), lambda: now, standing)
    for formation in (early, now):
        decision = policy.make_decision_for_non_running_worker_group()
        assert standing.formation == formation
        assert (decision.num_workers, decision.resources_per_worker) == (
            formation.nodes,
            {"GPU": formation.gpus_per_node},
        )
        standing.early = None  # as the worker group does, whatever becomes of them


def test_a_failure_policy_decides_whether_it_goes_on() -> None:
    """Trap 3: with Ray's own a controller's error ends the run once its limit is reached."""
    assert calling(TrainController, "make_decision")
    ours = policies()["_KeepGoing"]
    assert issubclass(ours, FailurePolicy)
    assert not ours.__abstractmethods__
    failed = ours(FailureConfig()).make_decision(ControllerError(WorkerGroupStartupFailedError("a node is gone")))
    assert failed is FailureDecision.RETRY
    nobody = ours(FailureConfig()).make_decision(ControllerError(NobodyLeadsError("gone")))
    assert nobody is FailureDecision.RAISE


def policies() -> dict[str, Any]:
    return {name: found for name, found in vars(trainer).items() if inspect.isclass(found)}


def test_the_settings_that_we_give_are_still_settings() -> None:
    assert {constants.HEALTH_CHECK_INTERVAL_S_ENV_VAR, constants.ENABLE_PREEMPTION_WATCHER_ENV_VAR} == set(SETTINGS)
    assert FailureConfig(max_failures=-1).max_failures == -1
    assert "name" in parameters(RunConfig)
    assert {"num_workers", "use_gpu", "resources_per_worker"} <= set(parameters(ScalingConfig))


def test_this_is_the_ray_that_was_examined() -> None:
    assert ray.__version__.startswith("2.60."), "read the hooks above in the new version, then raise this line"
