"""One node's health agent: look, judge, tell the arbiter, once a period, whatever hangs or is away."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Awaitable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from tidegate.arbiter.messages import GpuSeen, HealthReport
from tidegate.clock import Clock
from tidegate.errors import NoArbiterError
from tidegate.health.history import History
from tidegate.health.judge import Finding, judge
from tidegate.health.readings import ListedGpu, Reading, Round, Signal, Source, Status
from tidegate.health.rules import temperature_celsius
from tidegate.health.table import DEADLINE_MISSED
from tidegate.ids import GpuId, NodeId
from tidegate.spec.policy import HealthSpec

logger = logging.getLogger(__name__)


class Reporter(Protocol):
    """Who is told; `ArbiterClient` is one."""

    def report_health(self, report: HealthReport) -> Awaitable[None]: ...


class Memory(Protocol):
    """Where verdicts outlive the agent's process."""

    def load(self) -> History: ...

    def save(self, history: History) -> None: ...


class Meters(Protocol):
    """Where people see the values."""

    def show(self, report: HealthReport, tick_s: float) -> None: ...


@dataclass(slots=True)
class _Look:
    """A call of the source that is on its way, in a thread of its own."""

    answer: asyncio.Future[Round]
    started_s: float
    """Of the monotonic clock."""
    misses: int = 0
    """Deadlines that have gone by."""


class HealthAgent:
    """The four things it does: look, judge, remember, report.

    The source is asked in a thread, and only ever by one: a call that hangs keeps its thread and no second is started.
    Nothing here waits for the arbiter; a report that is still on its way when the next is due is not joined by another.
    """

    def __init__(
        self,
        *,
        node: NodeId,
        spec: HealthSpec,
        source: Source,
        reporter: Reporter,
        memory: Memory,
        meters: Meters,
        clock: Clock,
    ) -> None:
        self._node, self._spec = node, spec
        self._source, self._reporter, self._memory, self._meters, self._clock = source, reporter, memory, meters, clock
        self._history = memory.load()
        self._look: _Look | None = None
        self._gpus: tuple[ListedGpu, ...] = ()
        self._sending: asyncio.Task[None] | None = None
        self._arbiter_away: str | None = None
        self._said: dict[tuple[str, str], str] = {}

    async def run(self) -> None:
        """Tick for ever, once each `period_s`; a late tick is not made up for."""
        due_s = time.monotonic()
        while True:
            await self.tick()
            due_s = max(due_s + self._spec.period_s, time.monotonic())
            await asyncio.sleep(due_s - time.monotonic())

    async def tick(self) -> HealthReport:
        """One look, judged and sent on its way; takes no longer than one period."""
        started_s = time.monotonic()
        seen = await self._ask_source()
        report = self._judged(seen)
        self._meters.show(report, time.monotonic() - started_s)
        if self._sending is None or self._sending.done():
            self._sending = asyncio.get_running_loop().create_task(self._send(report))
        return report

    def set_healthy(self, subject: str) -> None:
        """A person has looked: what stands against this GPU (or this node, by its id) is lifted.

        A fault that is still there raises its verdict anew at the next look.
        """
        logger.warning("health: %s is set healthy by a person", subject)
        self._history = self._history.without(subject)
        self._memory.save(self._history)

    # Look

    async def _ask_source(self) -> Round:
        look = self._look = self._look or _start(self._source)
        done, _ = await asyncio.wait({look.answer}, timeout=self._spec.period_s)
        if done:
            self._look = None
            seen = look.answer.result()
            self._gpus = seen.gpus
            return seen
        waited_s = time.monotonic() - look.started_s
        error = f"NVML: no answer for {waited_s:.0f} s"
        misses = math.floor(waited_s / self._spec.reading_deadline_s)
        if misses == look.misses:
            return Round(gpus=self._gpus, readings=(), error=error)
        look.misses = misses
        missed = Reading(
            at_s=self._clock.now_s(),
            node=self._node,
            subject=self._node,
            signal=Signal.NVML_ANSWERS,
            value=None,
            status=Status.TIMEOUT,
            cause=DEADLINE_MISSED,
        )
        return Round(gpus=self._gpus, readings=(missed,), error=error)

    # Judge and remember

    def _judged(self, seen: Round) -> HealthReport:
        now_s = self._clock.now_s()
        judgement = judge(seen.readings, self._history, self._spec, now_s)
        self._history = judgement.history
        # Counts of rows that are on their way are not worth a write: losing them costs a sample, not a verdict.
        if judgement.worth_saving:
            self._memory.save(judgement.history)
        if seen.readings:
            self._log(judgement.findings)
        return HealthReport(
            node=self._node,
            at_s=now_s,
            gpus=self._inventory(seen),
            verdicts=judgement.verdicts,
            source_error=seen.error,
        )

    def _inventory(self, seen: Round) -> tuple[GpuSeen, ...]:
        celsius: dict[str, float | None] = {}
        tensor: dict[str, float | None] = {}
        memory: dict[str, float | None] = {}
        processes: dict[str, float | None] = {}
        for reading in seen.readings:
            if reading.signal is Signal.GPU_TEMPERATURE:
                celsius[reading.subject] = temperature_celsius(reading, self._spec.temperature)
            elif reading.signal is Signal.GPU_TENSOR_ACTIVE:
                tensor[reading.subject] = reading.value
            elif reading.signal is Signal.GPU_MEMORY_USED:
                memory[reading.subject] = reading.value
            elif reading.signal is Signal.GPU_PROCESSES:
                processes[reading.subject] = reading.value
        return tuple(
            GpuSeen(
                uuid=GpuId(gpu.uuid),
                index=gpu.index,
                temperature_celsius=celsius.get(gpu.uuid),
                tensor_active_ratio=tensor.get(gpu.uuid),
                memory_used_bytes=_whole(memory.get(gpu.uuid)),
                processes=_whole(processes.get(gpu.uuid)),
            )
            for gpu in seen.gpus
        )

    def _log(self, findings: tuple[Finding, ...]) -> None:
        """Each thing is said when it begins or changes, not at each look."""
        now = {(finding.subject, finding.what): finding.text for finding in findings}
        for key, text in now.items():
            if self._said.get(key) != text:
                logger.warning("health: %s: %s: %s", *key, text)
        self._said = now

    # Report

    async def _send(self, report: HealthReport) -> None:
        try:
            await self._reporter.report_health(report)
        except NoArbiterError as error:
            # It comes back by itself; verdicts are repeated in each report, so nothing is lost.
            if self._arbiter_away is None:
                logger.warning("health: %s", error)
            self._arbiter_away = str(error)
            return
        except Exception:
            # The arbiter answers with an error of its own: its fault, in its journal. Health goes on all the same.
            logger.exception("health: the arbiter did not take the report")
            return
        if self._arbiter_away is not None:
            logger.warning("health: the arbiter answers again")
            self._arbiter_away = None


def _start(source: Source) -> _Look:
    answer: Future[Round] = Future()

    def ask() -> None:
        try:
            answer.set_result(source.read())
        except BaseException as error:
            # Handed to the agent's loop, which ends by it: a source that breaks its promise must not go unseen.
            answer.set_exception(error)

    # Not an executor: those are joined when the process ends, and a call into a dead driver never comes back.
    threading.Thread(target=ask, name="health-source", daemon=True).start()
    return _Look(answer=asyncio.wrap_future(answer), started_s=time.monotonic())


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
