"""The coordinator: a detached actor that claims GPUs for one run, leads its gang and lets go of them.

It only carries messages: what happens on an event is decided in `states.py`, who gets GPUs by the arbiter.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.metrics import Gauge

from tidegate.arbiter.client import NAMESPACE, ArbiterClient
from tidegate.arbiter.messages import ClaimSpec, GangPhase, GangReport, Grant
from tidegate.errors import ClaimUndoneError, NoArbiterError, RunExistsError
from tidegate.gang.agent import AgentJob, Reply, train_fn
from tidegate.gang.states import (
    Beaten,
    Event,
    Evicted,
    Gang,
    Joined,
    Member,
    Note,
    Status,
    StopAsked,
    TrainEnded,
    advance,
    is_member,
    phase_of,
)
from tidegate.gang.trainer import NodeTrainer
from tidegate.ids import ClaimId, Generation, GpuId, NodeId, coordinator_name
from tidegate.train.config import RunConfig

log = logging.getLogger(__name__)

JOURNAL = "gang.jsonl"
REPORT_EVERY_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOrder:
    """What a job asks for."""

    claim: ClaimSpec
    config: RunConfig
    data_dir: str
    run_dir: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """What a job is told about its run."""

    state: str
    """`claiming`, then the gang's status."""
    reason: str
    step: int
    steps: int
    loss: float | None
    world_size: int
    generation: int
    over: bool
    """The run has ended and its GPUs are given back."""


class Coordinator:
    def __init__(self, order: RunOrder) -> None:
        self._order = order
        self._arbiter = ArbiterClient()
        self._claim: ClaimId | None = None
        self._gang: Gang | None = None
        self._ended: tuple[str, str] | None = None
        self._stop_reason: str | None = None
        self._over = False
        self._journal = Path(order.run_dir) / JOURNAL
        self._changed = asyncio.Event()
        self._gauges = _Gauges(order.claim.name)

    async def start(self, order: RunOrder) -> ClaimId:
        """File the claim and go on by itself; asked again with the same order it answers with the same claim.

        Raises:
            ClaimNeverFitsError: the cluster could never give it.
            RunExistsError: this run goes on with another order.
        """
        if differs := _differs(self._order, order):
            raise RunExistsError(self._order.claim.name, differs)
        if self._claim is None:
            Path(self._order.run_dir).mkdir(parents=True, exist_ok=True)
            self._spec = (await self._arbiter.policy()).gang
            self._claim = await self._arbiter.claim(self._order.claim)
            self._life = asyncio.get_running_loop().create_task(self._live())
        return self._claim

    async def stop(self, reason: str) -> None:
        """Save, then leave."""
        self._stop_reason = reason
        if self._gang is not None:
            self._happen(StopAsked(reason=reason))

    async def status(self) -> RunStatus:
        gang = self._gang
        state, reason = "claiming", ""
        if gang is not None:
            state, reason = str(gang.status), gang.reason
        if self._ended is not None:
            state, reason = self._ended
        return RunStatus(
            state=state,
            reason=reason,
            step=gang.best_step if gang else -1,
            steps=self._order.config.steps,
            loss=_loss(gang),
            world_size=gang.plan.world_size if gang and gang.plan else 0,
            generation=gang.plan.generation if gang and gang.plan else 0,
            over=self._over,
        )

    # Agents

    async def join(self, member: Member) -> None:
        self._happen(Joined(member=member))

    async def beat(self, report: Beaten) -> Reply:
        self._happen(report)
        gang = self._gang
        if gang is None or not is_member(gang, report.node, report.agent):
            return Reply(plan=None, leave=True, stop=False)
        ended = gang.status in (Status.FINISHED, Status.FAILED)
        plan = gang.plan if gang.status in (Status.LAUNCHING, Status.RUNNING) else None
        return Reply(plan=plan, leave=ended, stop=gang.stop_reason is not None)

    async def cleared(self, what: tuple[NodeId, Generation, float]) -> None:
        node, generation, at_s = what
        reason = f"{node[:12]} holds no rank of a generation before {generation}"
        data = {"node": node, "generation": generation, "gone_at_s": at_s}
        self._write(Note(kind="cleared", reason=reason, data=data))

    # The arbiter

    async def evict(self, node: NodeId, gpu: GpuId | None, reason: str, reading_at_s: float) -> None:
        self._write(Note(kind="verdict", reason=reason, data={"node": node, "gpu": gpu, "reading_at_s": reading_at_s}))
        self._happen(Evicted(node=node, gpu=gpu, reason=reason))

    # Its own life

    async def _live(self) -> None:
        reporter = asyncio.get_running_loop().create_task(self._report())
        try:
            grant = await self._granted()
            await asyncio.to_thread(self._fit, grant)
            gang = self._gang
            assert gang is not None
            self._ended = (str(gang.status), gang.reason)
        except ClaimUndoneError as error:
            self._ended = ("failed", str(error))
        except Exception as error:
            log.exception("the run ended badly")
            self._ended = ("failed", f"{type(error).__name__}: {error}")
        reporter.cancel()
        await self._let_go(self._ended[1])

    async def _granted(self) -> Grant:
        assert self._claim is not None
        while True:
            if self._stop_reason is not None:
                await self._arbiter.release(self._claim, self._stop_reason)
            try:
                grant = await self._arbiter.grant(self._claim, wait_s=2.0)
            except NoArbiterError as error:
                log.warning("%s", error)
                await asyncio.sleep(0.5)
                continue
            if grant is not None:
                self._begin(grant)
                return grant

    def _begin(self, grant: Grant) -> None:
        self._gang = Gang(
            claim=grant.claim,
            nodes=tuple(node.node for node in grant.nodes),
            min_ranks=self._order.claim.min_gpus,
            max_ranks=self._order.claim.max_gpus,
        )
        self._write(
            Note(
                kind="granted",
                reason=f"{sum(len(node.gpus) for node in grant.nodes)} GPUs on {len(grant.nodes)} nodes",
                data={"nodes": [node.node for node in grant.nodes], "generation": grant.generation},
            )
        )

    def _fit(self, grant: Grant) -> None:
        """Run Ray Train until the gang has ended; blocks."""
        job = AgentJob(
            coordinator=coordinator_name(self._order.claim.name),
            config=self._order.config,
            data_dir=self._order.data_dir,
            run_dir=self._order.run_dir,
            gpus={node.node: node.gpus for node in grant.nodes},
            heartbeat_s=self._spec.heartbeat_s,
        )
        try:
            NodeTrainer(train_fn, {"job": job}, grant, Path(self._order.run_dir)).fit()
        except Exception as error:
            # Ray Train's own error: the gang has lost its nodes for good. Recorded as the run's end.
            log.exception("Ray Train has given up")
            self._happen(TrainEnded(error=f"Ray Train: {type(error).__name__}: {error}"))

    async def _let_go(self, reason: str) -> None:
        assert self._claim is not None
        while True:
            try:
                if self._gang is not None:
                    await self._arbiter.report_gang(self._gang_report(self._gang))
                await self._arbiter.release(self._claim, reason)
                self._over = True
                return
            except NoArbiterError as error:
                log.warning("cannot let go yet: %s", error)
                await asyncio.sleep(0.5)

    def _happen(self, event: Event) -> None:
        if self._gang is None:
            return
        before = self._gang
        self._gang, notes = advance(self._gang, event, self._spec, time.time())
        if self._stop_reason is not None and self._gang.stop_reason is None:
            self._gang, more = advance(self._gang, StopAsked(reason=self._stop_reason), self._spec, time.time())
            notes = (*notes, *more)
        for note in notes:
            self._write(note)
        if before.status is not self._gang.status or before.plan is not self._gang.plan:
            self._changed.set()

    async def _report(self) -> None:
        """Tell the arbiter: at each change at once, else twice a second. Ends are told by `_let_go`."""
        while True:
            gang = self._gang
            if gang is not None and gang.status not in (Status.FINISHED, Status.FAILED):
                report = self._gang_report(gang)
                self._gauges.show(report)
                try:
                    await self._arbiter.report_gang(report)
                except NoArbiterError as error:
                    log.warning("%s", error)
            try:
                await asyncio.wait_for(self._changed.wait(), REPORT_EVERY_S)
            except TimeoutError:
                continue
            self._changed.clear()

    def _gang_report(self, gang: Gang) -> GangReport:
        phase = phase_of(gang)
        if self._ended is not None:
            phase = GangPhase.FINISHED if gang.status is Status.FINISHED else GangPhase.FAILED
        slots = gang.plan.slots if gang.plan is not None else ()
        return GangReport(
            claim=gang.claim,
            at_s=time.time(),
            phase=phase,
            gang_generation=gang.plan.generation if gang.plan else Generation(0),
            step=gang.best_step,
            world_size=len(slots),
            gpus=tuple(slot.gpu for slot in slots),
            pids=tuple(gang.beats[slot.rank].pid if slot.rank in gang.beats else None for slot in slots),
            loss=_loss(gang),
            reason=gang.reason,
        )

    def _write(self, note: Note) -> None:
        line = {"at_s": time.time(), **asdict(note)}
        with self._journal.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


class _Gauges:
    """The run's metrics; Ray exports them with the prefix `ray_`."""

    def __init__(self, run: str) -> None:
        self._tags = {"run": run}
        self._step = Gauge("tidegate_train_step", "Steps done", tag_keys=("run",))
        self._loss = Gauge("tidegate_train_loss", "Loss of the newest step", tag_keys=("run",))
        self._ranks = Gauge("tidegate_train_ranks", "Ranks of the present generation", tag_keys=("run",))
        self._generation = Gauge("tidegate_train_generation", "Fencing number of the gang", tag_keys=("run",))

    def show(self, report: GangReport) -> None:
        self._step.set(report.step, self._tags)
        self._ranks.set(report.world_size, self._tags)
        self._generation.set(report.gang_generation, self._tags)
        if report.loss is not None:
            self._loss.set(report.loss, self._tags)


def _differs(mine: RunOrder, asked: RunOrder) -> tuple[str, ...]:
    """What another job asks of the run that this one doesn't do. Who asks does not matter."""
    claim, other = asdict(mine.claim), asdict(asked.claim)
    differs = [
        f"{key} {claim[key]} (asked: {other[key]})" for key in claim if key != "owner" and claim[key] != other[key]
    ]
    differs += [
        f"{key} {getattr(mine, key)} (asked: {getattr(asked, key)})"
        for key in ("data_dir", "run_dir")
        if getattr(mine, key) != getattr(asked, key)
    ]
    return (*differs, *(["config"] if mine.config != asked.config else []))


def _loss(gang: Gang | None) -> float | None:
    return next((beat.loss for beat in gang.beats.values() if beat.loss is not None), None) if gang else None


def start_coordinator(order: RunOrder) -> Any:
    """The run's coordinator: started on this node, or found when it runs already. Detached: it outlives the job."""
    return (
        ray.remote(Coordinator)
        .options(
            name=coordinator_name(order.claim.name),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_concurrency=1000,
            label_selector={"ray.io/node-id": ray.get_runtime_context().get_node_id()},
        )
        .remote(order)
    )
