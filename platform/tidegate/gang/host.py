"""The process of Ray Train's controller: a detached actor, so that workers and ranks outlive the gang's coordinator.

Importing Ray Train takes a second or two. The workers of a run don't wait for that: they start before, and Ray Train
takes them over. A spare process stands by with its imports done: when a controller is killed, the next one leads at
once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from tidegate.arbiter.client import NAMESPACE
from tidegate.gang.agent import AgentJob, train_fn
from tidegate.gang.node_worker import Workers, start_workers
from tidegate.gang.plan import Ask, Formation, NobodyLeadsError
from tidegate.ids import NodeId, coordinator_name

if TYPE_CHECKING:
    from tidegate.gang.trainer import NodeTrainer

log = logging.getLogger(__name__)

POLL_S = 0.5
"""How often Ray Train looks at its workers (its default, 2 s, is most of a node restart's notice)."""
IMPORT_BY_S = 3.0
"""Where GPUs come sooner than this, Ray Train is imported once the workers run: it would take processor time from their
start, which the gang's first step waits for. Where they come later, it is imported while they are awaited."""
LOOK_EVERY_S = 20.0
ASK_WAIT_S = 5.0
ASK_AGAIN_S = 0.2
RAY_TRAIN = "ray_train"
"""Where Ray Train keeps its own books of a run."""
SETTINGS = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": str(POLL_S),
    # It would wait out a node's whole drain and then restart; here a drain notice comes from the arbiter.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
}


class TrainHost:
    """Leads Ray Train for one run, once."""

    def __init__(self, coordinator: str) -> None:
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
        self._workers_run = threading.Event()
        self._trainer = import_trainer(self._workers_run)
        self._coordinator = coordinator
        self._ended: Future[str | None] | None = None
        threading.Thread(target=self._end_without_coordinator, name="end-without-coordinator", daemon=True).start()

    async def ready(self) -> NodeId:
        """Its node, once it can lead."""
        return NodeId(ray.get_runtime_context().get_node_id())

    async def stand_by(self) -> None:
        """Doesn't return: whoever waits for it hears of this process's end."""
        await asyncio.Event().wait()

    async def lead(self, job: AgentJob, train: int) -> str | None:
        """Run Ray Train until the gang has ended; why it failed, None where it did not. A second call joins the
        first: a coordinator that comes back waits for what it had started."""
        if self._ended is None:
            self._ended = Future()
            threading.Thread(target=self._run, args=(job, train, self._ended), name="ray-train", daemon=True).start()
        return await asyncio.shield(asyncio.wrap_future(self._ended))  # the caller may go, the gang stays

    def _run(self, job: AgentJob, train: int, ended: Future[str | None]) -> None:
        try:
            shutil.rmtree(Path(job.run_dir) / RAY_TRAIN, ignore_errors=True)  # nothing of ours is in it
            name = f"{train}-{time.time_ns()}"  # a folder of its own: nothing of another controller is ever read back
            ask, settings = _Asking(job, train), {"job": job}
            early = start_early(ask, train_fn, settings, self._workers_run)
            trainer = self._trainer.result()
            trainer(train_fn, settings, Path(job.run_dir) / RAY_TRAIN, name, ask, early).fit()
            ended.set_result(None)
        except Exception as error:
            log.exception("Ray Train has ended badly")
            ended.set_result(f"{type(error).__name__}: {error}")

    def _end_without_coordinator(self) -> None:
        """Nobody would ever end this process otherwise."""
        missing = 0
        while missing < 2:
            time.sleep(LOOK_EVERY_S)
            try:
                ray.get_actor(self._coordinator, namespace=NAMESPACE)
                missing = 0
            except ValueError:
                missing += 1
            except ray.exceptions.RayError as error:  # the head is away: that says nothing about the coordinator
                log.warning("cannot look for %s: %s", self._coordinator, error)
        os._exit(1)


def import_trainer(workers_run: threading.Event) -> Future[type[NodeTrainer]]:
    """Its class, imported in a thread once the workers run, and after `IMPORT_BY_S` even if they don't."""

    def imported() -> type[NodeTrainer]:
        workers_run.wait(IMPORT_BY_S)
        from tidegate.gang.trainer import NodeTrainer

        return NodeTrainer

    thread = ThreadPoolExecutor(1, thread_name_prefix="import-trainer")
    try:
        return thread.submit(imported)
    finally:
        thread.shutdown(wait=False)


def start_early(
    ask: Ask, function: Callable[[dict[str, Any]], None], settings: dict[str, Any], workers_run: threading.Event
) -> Workers | None:
    """Start the first workers where `ask` says, and set `workers_run` when they run, or after `IMPORT_BY_S`. None when
    the group is gone by then, and Ray Train has to ask again.

    Raises:
        NobodyLeadsError: from `ask`.
    """
    formation = ask()
    try:
        group = ray.util.get_placement_group(formation.group)
    except ValueError as error:
        log.warning("no early start: %s", error)
        workers_run.set()
        return None
    workers = start_workers(group, formation, function, settings)
    ray.wait(list(workers.told), num_returns=len(workers.told), timeout=IMPORT_BY_S)
    workers_run.set()
    return workers


class _Asking:
    """Asks the coordinator where the workers may start, until it says so."""

    def __init__(self, job: AgentJob, train: int) -> None:
        self._job, self._train = job, train

    def __call__(self) -> Formation:
        heard_s = time.monotonic()
        while True:
            try:
                coordinator = ray.get_actor(self._job.coordinator, namespace=NAMESPACE)
                formation: Formation | None = ray.get(
                    coordinator.formation.remote(self._train, ASK_WAIT_S), timeout=2 * ASK_WAIT_S
                )
                if formation is not None:
                    return formation
                heard_s = time.monotonic()
            except (ValueError, ray.exceptions.RayError) as error:
                silent_s = time.monotonic() - heard_s
                if silent_s > self._job.silent_after_s:
                    raise NobodyLeadsError(f"{self._job.coordinator}: silent for {silent_s:.0f} s") from error
                log.warning("the coordinator does not answer: %s", error)
                time.sleep(ASK_AGAIN_S)


def start_host(run: str, train: int, options: dict[str, Any]) -> Any:
    """The run's Train host of this number, started if it isn't there; returns before its imports are done."""
    return (
        ray.remote(TrainHost)
        .options(
            name=host_name(run, train),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_concurrency=1000,
            **options,
        )
        .remote(coordinator_name(run))
    )


def find_host(run: str, train: int) -> Any:
    """None where it has ended."""
    try:
        return ray.get_actor(host_name(run, train), namespace=NAMESPACE)
    except ValueError:
        return None


def host_name(run: str, train: int) -> str:
    return f"train-{run}-{train}"


def end_host(run: str, train: int) -> None:
    """End it, and with it the workers that it owns."""
    host = find_host(run, train)
    if host is not None:
        ray.kill(host)
