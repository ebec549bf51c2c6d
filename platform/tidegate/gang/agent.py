"""A node's agent in a gang: the body of a Ray Train worker. It imports no torch; its ranks do.

It follows the coordinator's plan: whatever generation it holds that is not the plan's, it kills; the plan's it starts.
A rank's death is seen by its sentinel at once, and told at once.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import wait
from typing import Any

import ray

from tidegate.arbiter.client import NAMESPACE
from tidegate.errors import TidegateError
from tidegate.gang import beat
from tidegate.gang.rank import PRELOAD, RankJob, rank_main
from tidegate.gang.states import Beaten, Member, Plan, RankBeat, Slot
from tidegate.ids import Generation, GpuId, NodeId
from tidegate.train.config import RunConfig

log = logging.getLogger(__name__)

COORDINATOR_SILENT_AFTER_S = 60.0
NOTHING_HELD = Generation(0)


class CoordinatorGoneError(TidegateError):
    """The gang's coordinator has not answered for a long time; the agent ends its ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentJob:
    """What every agent of a gang is told."""

    coordinator: str
    config: RunConfig
    data_dir: str
    run_dir: str
    gpus: dict[NodeId, tuple[GpuId, ...]]
    heartbeat_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The coordinator's answer to a beat."""

    plan: Plan | None
    leave: bool
    """The gang has ended, or this agent no longer speaks for its node."""
    stop: bool
    """Ranks should save and leave."""


@dataclass(slots=True)
class _Rank:
    slot: Slot
    process: Any
    cells: Any

    def beat(self) -> RankBeat:
        return beat.read(self.cells, self.slot.rank, self.process.pid, self.process.exitcode)


@dataclass(slots=True)
class NodeAgent:
    job: AgentJob
    node: NodeId
    address: str
    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    generation: Generation = field(init=False, default=NOTHING_HELD)
    ranks: list[_Rank] = field(init=False, default_factory=list)
    _heard_s: float = field(init=False, default_factory=time.monotonic)

    def run(self) -> None:
        """Follow plans until the coordinator says that the gang has ended.

        Raises:
            CoordinatorGoneError: nobody has answered for `COORDINATOR_SILENT_AFTER_S`.
        """
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOAD))
        with _no_main_module():
            forkserver.ensure_running()
        try:
            self._ask(
                "join",
                Member(
                    node=self.node,
                    agent=self.name,
                    address=self.address,
                    port=_free_port(),
                    gpus=self.job.gpus[self.node],
                ),
            )
            while True:
                reply = self._beat()
                if reply is not None:
                    if reply.leave:
                        return
                    if reply.stop:
                        for rank in self.ranks:
                            beat.ask_to_stop(rank.cells)
                    if reply.plan is not None and reply.plan.generation > self.generation:
                        self._follow(reply.plan, context)
                        continue
                self._wait()
        finally:
            self._kill()

    def _beat(self) -> Reply | None:
        report = Beaten(
            node=self.node,
            agent=self.name,
            generation=self.generation,
            port=_free_port(),
            ranks=tuple(rank.beat() for rank in self.ranks),
        )
        reply: Reply | None = self._ask("beat", report)
        return reply

    def _ask(self, method: str, argument: object) -> Any:
        """Call the coordinator; None when it does not answer. The ranks train on without it for a while."""
        try:
            actor = ray.get_actor(self.job.coordinator, namespace=NAMESPACE)
            answer = ray.get(getattr(actor, method).remote(argument), timeout=10.0)
        except (ValueError, ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
            silent_s = time.monotonic() - self._heard_s
            if silent_s > COORDINATOR_SILENT_AFTER_S:
                raise CoordinatorGoneError(f"{self.job.coordinator}: silent for {silent_s:.0f} s") from error
            log.warning("the coordinator does not answer: %s", error)
            return None
        self._heard_s = time.monotonic()
        return answer

    def _follow(self, plan: Plan, context: Any) -> None:
        self._kill()
        self._ask("cleared", (self.node, plan.generation, time.time()))
        self.generation = plan.generation
        for slot in plan.slots:
            if slot.node != self.node:
                continue
            cells = context.RawArray("d", beat.FIELDS)
            beat.clear(cells)
            job = RankJob(
                config=self.job.config,
                data_dir=self.job.data_dir,
                run_dir=self.job.run_dir,
                plan=plan,
                slot=slot,
            )
            # Not daemonic: a rank may have children of its own (a checkpoint's writer).
            process = context.Process(target=rank_main, args=(job, cells), daemon=False)
            with _no_main_module():
                process.start()
            self.ranks.append(_Rank(slot=slot, process=process, cells=cells))

    def _wait(self) -> None:
        alive = [rank.process.sentinel for rank in self.ranks if rank.process.exitcode is None]
        if alive:
            wait(alive, timeout=self.job.heartbeat_s)
        else:
            time.sleep(self.job.heartbeat_s)

    def _kill(self) -> None:
        for rank in self.ranks:
            if rank.process.exitcode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.process.pid, signal.SIGKILL)
        for rank in self.ranks:
            rank.process.join()
        self.ranks = []


@contextlib.contextmanager
def _no_main_module() -> Iterator[None]:
    """Keep `multiprocessing` from running our `__main__` again in each rank.

    In a Ray worker that is Ray's start script: its imports cost a rank most of a second and are of no use there.
    """
    main = sys.modules["__main__"]
    file = main.__dict__.pop("__file__", None)
    spec, main.__spec__ = main.__spec__, None
    try:
        yield
    finally:
        main.__spec__ = spec
        if file is not None:
            main.__file__ = file


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def train_fn(settings: dict[str, Any]) -> None:
    """Ray Train's `train_loop_per_worker`."""
    job: AgentJob = settings["job"]
    node = NodeId(ray.get_runtime_context().get_node_id())
    NodeAgent(job=job, node=node, address=ray.util.get_node_ip_address()).run()
