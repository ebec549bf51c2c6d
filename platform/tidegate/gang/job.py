"""What a job does with its run: start it, follow it, and turn a stop into save-and-leave."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import ray

from tidegate.arbiter.client import BACK_WITHIN_S, NAMESPACE, ArbiterClient
from tidegate.arbiter.messages import ClaimSpec
from tidegate.errors import RunExistsError, TidegateError
from tidegate.gang.agent import CoordinatorGoneError
from tidegate.gang.coordinator import start_coordinator
from tidegate.gang.order import RunOrder, RunStatus
from tidegate.ids import coordinator_name
from tidegate.train.config import RunConfig

FOLLOW_EVERY_S = 1.0
COORDINATOR_BACK_WITHIN_S = 120.0
"""It is restarted when it is killed, and so is its node's head; the run goes on meanwhile."""
CALL_DEADLINE_S = 10.0
REPLACE_DEADLINE_S = 10.0


def follow_run(
    config: RunConfig,
    data_dir: str,
    run_dir: Path,
    *,
    max_gpus: int,
    min_gpus: int,
    claim_class: str,
    say: Callable[[str], None],
    order: int = 0,
    gpus_per_node: int | None = None,
    one_domain: bool = False,
    deadline_s: float | None = None,
    drain_deadline_s: float | None = None,
    patience_s: float | None = None,
) -> int:
    """Start (or find) the run, say what happens to it, and return the job's exit code: 0 if it finished.

    SIGTERM and SIGINT (`ray job stop`, Ctrl-C) mean: save, then leave. What is asked for is explained at `ClaimSpec`.

    Raises:
        ClaimNeverFitsError: the cluster could never give what is asked.
        RunExistsError: the run goes on already, with other settings.
        RunRefusedError: its settings and the policy's contradict each other.
        NoArbiterError: nobody answers, or (`ArbiterSilentError`) not within `BACK_WITHIN_S`.
    """
    claim = ClaimSpec(
        name=config.name,
        claim_class=claim_class,
        order=order,
        max_gpus=max_gpus,
        min_gpus=min_gpus,
        owner=f"job {ray.get_runtime_context().get_job_id()}",
        gpus_per_node=gpus_per_node,
        one_domain=one_domain,
        deadline_s=deadline_s,
        drain_deadline_s=drain_deadline_s,
        patience_s=patience_s,
    )
    run = RunOrder(claim=claim, config=config, data_dir=data_dir, run_dir=str(run_dir))
    off_head = asyncio.run(ArbiterClient(patience_s=BACK_WITHIN_S).policy()).gang.off_head
    coordinator = _coordinator(run, off_head)
    stop = threading.Event()

    def on_signal(_signal: int, _frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    filed = coordinator.start.remote(run)
    while not ray.wait([filed], timeout=FOLLOW_EVERY_S)[0]:
        if stop.is_set():
            ray.kill(coordinator)
            say("stopped before its claim was filed")
            return 1
    try:
        say(f"claim {ray.get(filed)} is filed")
    except ray.exceptions.RayTaskError as error:
        if not isinstance(error.cause, TidegateError):
            raise
        if not isinstance(error.cause, RunExistsError):  # that coordinator leads somebody's run
            ray.kill(coordinator)
        raise error.cause from None
    try:
        return _follow(_Calls(coordinator, coordinator_name(run.claim.name)), stop, say)
    except CoordinatorGoneError:
        # Another job that followed the same run has put it away, or its node is gone: the run's records say which.
        say("the run's coordinator is gone; see gang.jsonl in the run directory")
        return 1


class _Calls:
    """Calls of a coordinator that may be between two of its processes."""

    def __init__(self, actor: Any, name: str) -> None:
        self.actor, self._name = actor, name

    def __call__(self, method: str, *arguments: object) -> Any:
        """Raises CoordinatorGoneError when it is gone for good, or doesn't come back."""
        ends_s = time.monotonic() + COORDINATOR_BACK_WITHIN_S
        while True:
            try:
                return ray.get(getattr(self.actor, method).remote(*arguments), timeout=CALL_DEADLINE_S)
            except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
                if time.monotonic() > ends_s or not self._is_known():
                    raise CoordinatorGoneError(self._name) from error
                time.sleep(FOLLOW_EVERY_S)

    def _is_known(self) -> bool:
        try:
            ray.get_actor(self._name, namespace=NAMESPACE)
        except ValueError:
            return False
        except ray.exceptions.RayError:  # the head is away: nobody knows
            return True
        return True


def _follow(call: _Calls, stop: threading.Event, say: Callable[[str], None]) -> int:
    said = ""
    asked = False
    while True:
        if stop.is_set() and not asked:
            asked = True
            say("stopping: the run saves, then leaves")
            call("stop", "the job was stopped")
        status: RunStatus = call("status")
        line = f"{status.state}: step {status.step}/{status.steps}, {status.world_size} ranks" + (
            f", loss {status.loss:.4f}" if status.loss is not None else ""
        )
        if line != said:
            said = line
            say(line)
        if status.over:
            say(f"{status.state}: {status.reason}")
            ray.kill(call.actor)
            return 0 if status.state == "finished" else 1
        # Once stop is set its wait returns at once, so after that an event that nobody sets gives the pause.
        (threading.Event() if asked else stop).wait(FOLLOW_EVERY_S)


def _coordinator(order: RunOrder, off_head: bool) -> Any:
    """The run's coordinator; one that a lost job left behind after its run was over is replaced."""
    coordinator = start_coordinator(order, off_head=off_head)
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
    return start_coordinator(order, off_head=off_head)
