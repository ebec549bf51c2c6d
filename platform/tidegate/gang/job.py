"""What a job does with its run: start it, follow it, and turn a stop into save-and-leave."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import ray

from tidegate.arbiter.client import NAMESPACE
from tidegate.arbiter.messages import ClaimSpec
from tidegate.errors import RunExistsError, TidegateError
from tidegate.gang.coordinator import RunOrder, RunStatus, start_coordinator
from tidegate.ids import coordinator_name
from tidegate.train.config import RunConfig

FOLLOW_EVERY_S = 1.0
REPLACE_DEADLINE_S = 10.0


def follow_run(
    config: RunConfig,
    data_dir: Path,
    run_dir: Path,
    *,
    max_gpus: int,
    min_gpus: int,
    claim_class: str,
    say: Callable[[str], None],
) -> int:
    """Start (or find) the run, say what happens to it, and return the job's exit code: 0 if it finished.

    SIGTERM and SIGINT (`ray job stop`, Ctrl-C) mean: save, then leave.

    Raises:
        ClaimNeverFitsError: the cluster could never give what is asked.
        RunExistsError: the run goes on already, with other settings.
    """
    claim = ClaimSpec(
        name=config.name,
        claim_class=claim_class,
        max_gpus=max_gpus,
        min_gpus=min_gpus,
        owner=f"job {ray.get_runtime_context().get_job_id()}",
    )
    order = RunOrder(claim=claim, config=config, data_dir=str(data_dir), run_dir=str(run_dir))
    coordinator = _coordinator(order)
    try:
        say(f"claim {ray.get(coordinator.start.remote(order))} is filed")
    except ray.exceptions.RayTaskError as error:
        if not isinstance(error.cause, TidegateError):
            raise
        if not isinstance(error.cause, RunExistsError):  # that coordinator leads somebody's run
            ray.kill(coordinator)
        raise error.cause from None
    stop = threading.Event()

    def on_signal(_signal: int, _frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    try:
        return _follow(coordinator, stop, say)
    except ray.exceptions.RayActorError:
        # Another job that followed the same run has put it away, or its node is gone: the run's records say which.
        say("the run's coordinator is gone; see gang.jsonl in the run directory")
        return 1


def _follow(coordinator: Any, stop: threading.Event, say: Callable[[str], None]) -> int:
    said = ""
    asked = False
    while True:
        if stop.is_set() and not asked:
            asked = True
            say("stopping: the run saves, then leaves")
            ray.get(coordinator.stop.remote("the job was stopped"))
        status: RunStatus = ray.get(coordinator.status.remote())
        line = f"{status.state}: step {status.step}/{status.steps}, {status.world_size} ranks" + (
            f", loss {status.loss:.4f}" if status.loss is not None else ""
        )
        if line != said:
            said = line
            say(line)
        if status.over:
            say(f"{status.state}: {status.reason}")
            ray.kill(coordinator)
            return 0 if status.state == "finished" else 1
        # Once stop is set its wait returns at once, so after that an event that nobody sets gives the pause.
        (threading.Event() if asked else stop).wait(FOLLOW_EVERY_S)


def _coordinator(order: RunOrder) -> Any:
    """The run's coordinator; one that a lost job left behind after its run was over is replaced."""
    coordinator = start_coordinator(order)
    status: RunStatus = ray.get(coordinator.status.remote())
    if not status.over:
        return coordinator
    ray.kill(coordinator)
    deadline = time.monotonic() + REPLACE_DEADLINE_S
    while time.monotonic() < deadline:
        try:
            ray.get_actor(coordinator_name(order.claim.name), namespace=NAMESPACE)
        except ValueError:
            break
        time.sleep(0.1)
    return start_coordinator(order)
