"""A node's agent in a gang: the body of a Ray Train worker. It imports no torch; its ranks do.

It follows the coordinator's replies: whatever generation it holds that is not the plan's, it kills; the plan's it
starts. A rank's death is seen by its sentinel at once, and told at once. While the coordinator is away (a restart, the
head's node lost) the ranks train on.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import ray

from tidegate.arbiter.client import NAMESPACE
from tidegate.arbiter.view import DOMAIN_LABEL
from tidegate.errors import TidegateError
from tidegate.gang import beat
from tidegate.gang.bell import Bell
from tidegate.gang.copies import NodeCopies
from tidegate.gang.events import Beaten
from tidegate.gang.plan import NEWS_WAIT_S, Gist, Member, Plan, RankBeat, Reply, Slot, Stacks
from tidegate.gang.rank import RankJob, rank_main
from tidegate.gang.stacks import py_spy, stacks_of
from tidegate.gang.warm_node import no_main_module, use_warm
from tidegate.ids import Generation, NodeId
from tidegate.ports import free_port
from tidegate.processes import AGENT_MARK, end_carriers, process_began_s, undertaken
from tidegate.train.config import RunConfig

log = logging.getLogger(__name__)

ANSWER_DEADLINE_S = 5.0
NOTHING_HELD = Generation(0)


class CoordinatorGoneError(TidegateError):
    """The gang's coordinator has not answered for a long time; the agent ends its ranks."""


class StaleAgentError(TidegateError):
    """Another agent speaks for this node now, or the gang stands elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentJob:
    """What every agent of a gang is told."""

    coordinator: str
    config: RunConfig
    data_dir: str
    run_dir: str
    heartbeat_s: float
    silent_after_s: float
    """Ranks are ended when the coordinator has not answered for so long."""
    secret: str = ""
    """Known to the run's agents and ranks alone: who asks for copies of its memory must know it."""


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
    domain: str | None = None
    """The node's label `tidegate/domain`."""
    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    generation: Generation = field(init=False, default=NOTHING_HELD)
    ranks: list[_Rank] = field(init=False, default_factory=list)
    _coordinator: Any = field(init=False, default=None)
    """Kept: with it the coordinator is reached also while the head, who knows names, is away."""
    _bell: Bell | None = field(init=False, default=None)
    _heard_s: float = field(init=False, default_factory=time.monotonic)
    _known: Gist = field(init=False, default=Reply().gist)
    """Of the newest reply."""
    _copies: NodeCopies | None = field(init=False, default=None)
    """None: the run keeps none in memory."""
    _stacks_dir: Path = field(init=False)
    """Where ranks write their own stacks when they are asked."""
    _told_of: Generation = field(init=False, default=NOTHING_HELD)
    """Whose stacks were told."""

    def run(self) -> None:
        """Follow plans until the coordinator says that the gang has ended or left.

        Raises:
            CoordinatorGoneError: nobody has answered for `silent_after_s`.
            StaleAgentError: another agent speaks for this node.
        """
        began_s = time.time()
        with undertaken(AGENT_MARK, self.name):  # it ends what the ranks leave, and a forkserver of our own too
            warm = use_warm(self.node)
            if self.job.config.checkpoint.ram_every_steps is not None:
                self._copies = NodeCopies(self.node, self.job.config.name, Path(self.job.run_dir), self.job.secret)
            self._stacks_dir = Path(tempfile.mkdtemp(prefix="tidegate-stacks-"))
            try:
                self._join({"process_at_s": process_began_s(), "began_at_s": began_s, "warm": float(warm)})
                self._lead(multiprocessing.get_context("forkserver"))
            finally:
                self._kill()
                if self._bell is not None:
                    self._bell.close()
                shutil.rmtree(self._stacks_dir, ignore_errors=True)
                if self._copies is not None:
                    self._copies.close()

    def _lead(self, context: Any) -> None:
        """Beat for beat, until the gang has ended or left."""
        self._bell = Bell(self._wait_for_news, self.job.heartbeat_s)
        while True:
            reply = self._beat()
            self._bell.taken_in()
            if reply is not None and self._obey(reply, context):
                self._kill()
                if self._copies is not None:
                    self._copies.forget()
                return
            self._wait()

    def _join(self, times: dict[str, float]) -> None:
        """Until it is confirmed: a gang that doesn't know of this agent would not watch its ranks (C042)."""
        member = Member(
            node=self.node,
            agent=self.name,
            address=self.address,
            port=free_port(),
            shelf_port=self._copies.port if self._copies is not None else 0,
            domain=self.domain,
            times=times,
        )
        while self._ask("join", member) is not True:
            time.sleep(self.job.heartbeat_s)

    def _obey(self, reply: Reply, context: Any) -> bool:
        """Do what the coordinator says; whether it was to end."""
        if reply.stacks_of == self.generation != self._told_of:
            self._tell_stacks()
        if reply.over:
            return True
        if reply.stale:
            raise StaleAgentError(f"{self.node[:12]}: another agent speaks for this node, or the gang stands elsewhere")
        if reply.clear:
            self._kill()
        if reply.plan is not None and reply.plan.generation > self.generation:
            self._follow(reply.plan, context)
        elif reply.stop:
            for rank in self.ranks:
                beat.ask_to_stop(rank.cells)
        return False

    def _tell_stacks(self) -> None:
        """Where each rank stands, before anything moves them."""
        self._told_of = self.generation
        alive = {rank.process.pid: rank for rank in self.ranks if rank.process.exitcode is None}
        texts = stacks_of({pid: self._stacks_path(rank.slot) for pid, rank in alive.items()}, py_spy())
        told = tuple((alive[pid].slot, text) for pid, text in texts.items())
        self._ask("stacks", Stacks(node=self.node, generation=self.generation, ranks=told))

    def _stacks_path(self, slot: Slot) -> Path:
        return self._stacks_dir / f"{self.generation}-{slot.rank}.txt"

    def _beat(self) -> Reply | None:
        report = Beaten(
            node=self.node,
            agent=self.name,
            generation=self.generation,
            port=free_port(),
            ranks=tuple(rank.beat() for rank in self.ranks),
        )
        reply: Reply | None = self._ask("beat", report)
        if reply is not None:
            self._known = reply.gist
        return reply

    def _wait_for_news(self) -> bool:
        """In the bell's thread."""
        coordinator = ray.get_actor(self.job.coordinator, namespace=NAMESPACE)
        asked = coordinator.news.remote(self.node, self.name, self._known)
        news: bool = ray.get(asked, timeout=NEWS_WAIT_S + ANSWER_DEADLINE_S)
        return news

    def _ask(self, method: str, argument: object) -> Any:
        """Call the coordinator; None when it does not answer. The ranks train on without it for a while."""
        try:
            if self._coordinator is None:
                self._coordinator = ray.get_actor(self.job.coordinator, namespace=NAMESPACE)
            answer = ray.get(getattr(self._coordinator, method).remote(argument), timeout=ANSWER_DEADLINE_S)
        except (ValueError, ray.exceptions.RayError) as error:
            if isinstance(error, ray.exceptions.ActorDiedError):
                self._coordinator = None  # for good; another one may bear its name
            silent_s = time.monotonic() - self._heard_s
            if silent_s > self.job.silent_after_s:
                raise CoordinatorGoneError(f"{self.job.coordinator}: silent for {silent_s:.0f} s: {error}") from error
            log.warning("the coordinator does not answer: %s", error)
            return None
        self._heard_s = time.monotonic()
        return answer

    def _follow(self, plan: Plan, context: Any) -> None:
        self._kill()
        self._ask("cleared", (self.node, plan.generation, time.time()))
        self.generation = plan.generation
        if self._copies is not None:
            self._copies.follow(plan)
        environment = dict(os.environ)
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
                environment=environment,
                stacks_path=str(self._stacks_path(slot)),
                secret=self.job.secret,
            )
            # Not daemonic: a rank may have children of its own (a checkpoint's writer).
            process = context.Process(target=rank_main, args=(job, cells), daemon=False)
            with no_main_module():
                process.start()
            self.ranks.append(_Rank(slot=slot, process=process, cells=cells))

    def _wait(self) -> None:
        alive = [rank.process.sentinel for rank in self.ranks if rank.process.exitcode is None]
        assert self._bell is not None
        wait([*alive, self._bell.ear], timeout=self.job.heartbeat_s)

    def _kill(self) -> None:
        for rank in self.ranks:
            if rank.process.exitcode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.process.pid, signal.SIGKILL)
        for rank in self.ranks:
            rank.process.join()
        if self.ranks:
            left = end_carriers(AGENT_MARK, self.name, spare_children_of=os.getpid())
            if left:
                log.warning("processes of ended ranks live on: %s", left)
        self.ranks = []


def train_fn(settings: dict[str, Any]) -> None:
    """Ray Train's `train_loop_per_worker`."""
    job: AgentJob = settings["job"]
    node = NodeId(ray.get_runtime_context().get_node_id())
    label: str | list[str] | None = ray.get_runtime_context().get_node_labels().get(DOMAIN_LABEL)
    domain = label[0] if isinstance(label, list) else label  # Ray's types and its values differ
    NodeAgent(job=job, node=node, address=ray.util.get_node_ip_address(), domain=domain).run()
