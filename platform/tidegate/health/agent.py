"""One node's health agent: look, judge, tell the arbiter, once a period, whatever hangs or is away."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

from tidegate.arbiter.messages import GpuSeen, HealthReport, Seat, Verdict
from tidegate.clock import Clock
from tidegate.errors import NoArbiterError
from tidegate.health.drills import Drill, DrillError, readings_of
from tidegate.health.events import EventFilter, named
from tidegate.health.examining import Examine
from tidegate.health.feeds import Feed, FeedRunner, all_answered
from tidegate.health.findings import Finding
from tidegate.health.gangs import compared, step_times, whole_gangs
from tidegate.health.history import BURN_IN, History
from tidegate.health.inventory import inventory
from tidegate.health.judge import Judgement, judge
from tidegate.health.latest import Latest
from tidegate.health.listening import EVENT_FRESH_S
from tidegate.health.readings import EVENTS, ListedGpu, Reading, Signal
from tidegate.health.returns import RETRY_S, after_burn_in, awaiting, held_for_burn_in, inherited
from tidegate.health.stopping import stop_a_rank
from tidegate.ids import GpuId, NodeId
from tidegate.spec.policy import HealthSpec

logger = logging.getLogger(__name__)

_GRACE_S = 0.05
"""How long a look waits for the quick sources; for those that are waited for it goes on to the end of its period."""
_FINDINGS = 100
_FORGET_S = 900.0
"""After so long without a reading, what was last read is no longer shown."""


class Reporter(Protocol):
    """Who is told; `ArbiterClient` is one."""

    def report_health(self, report: HealthReport) -> Awaitable[Mapping[GpuId, Seat]]:
        """The answer says whose ranks compute on the node's GPUs, and how their gangs do."""


class Memory(Protocol):
    """Where verdicts outlive the agent's process."""

    def load(self) -> History: ...

    def save(self, history: History) -> None: ...

    def left_behind(self) -> tuple[History, bool] | None:
        """A predecessor's, and whether the machine was booted since; None where there is nothing to take over."""
        ...


class Meters(Protocol):
    """Where people see the values."""

    def show(self, report: HealthReport, readings: Iterable[Reading], tick_s: float) -> None:
        """`readings`: all that are fresh, and the events of this look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """All that one node's agent knows, for people."""

    node: NodeId
    at_s: float
    readings: tuple[Reading, ...]
    findings: tuple[Finding, ...]
    """The last ones that began or changed, the oldest first."""
    verdicts: tuple[Verdict, ...]
    sources: Mapping[str, str]
    """Each source, and what is wrong with it; empty if nothing is."""


class HealthAgent:
    """The four things it does: look, judge, remember, report.

    Sources are asked in threads of their own (`feeds.py`); the look waits for those that are waited for, no longer than
    a period. Nothing here waits for the arbiter; a report that is still on its way when the next is due is not joined
    by another.
    """

    def __init__(
        self,
        *,
        node: NodeId,
        spec: HealthSpec,
        feeds: Sequence[Feed],
        reporter: Reporter,
        memory: Memory,
        meters: Meters,
        clock: Clock,
        examine: Examine | None = None,
    ) -> None:
        """`feeds`: of two that have the same value, the earlier one's counts; `examine`: what must pass before what was
        taken out comes back, if anything."""
        self._node, self._spec = node, spec
        self._runners = [FeedRunner(feed, node=node, clock=clock) for feed in feeds]
        self._reporter, self._memory, self._meters, self._clock = reporter, memory, meters, clock
        self._examine = examine
        self._examining: asyncio.Task[None] | None = None
        self._examine_next_s = 0.0
        self._history = memory.load()
        self._left_behind = memory.left_behind()
        self._began_s = clock.now_s()
        self._latest = Latest(spec.period_s)
        self._events = EventFilter()
        self._gpus: tuple[ListedGpu, ...] = ()
        self._silent: frozenset[str] = frozenset()
        self._sending: asyncio.Task[None] | None = None
        self._arbiter_away: str | None = None
        self._seats: Mapping[GpuId, Seat] = {}
        self._said: dict[tuple[str, str], str] = {}
        self._findings: deque[Finding] = deque(maxlen=_FINDINGS)
        self._verdicts: tuple[Verdict, ...] = ()

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
        readings = await self._look()
        report = self._judged(readings)
        if self._sending is None or self._sending.done():
            self._sending = asyncio.get_running_loop().create_task(self._send(report))
            await asyncio.sleep(0)  # it is on its way before the series are worked out
        now_s = self._clock.now_s()
        events = (reading for reading in readings if reading.signal in EVENTS)
        shown = chain(self._latest.fresh(now_s, self._silent), events)
        self._meters.show(report, shown, time.monotonic() - started_s)
        return report

    def set_healthy(self, subject: str) -> None:
        """A person has looked: what stands against this GPU (or this node, by its id) is lifted.

        A fault that is still there raises its verdict anew at the next look.
        """
        logger.warning("health: %s is set healthy by a person", subject)
        self._history = self._history.without(subject)
        self._memory.save(self._history)

    def drill(self, drill: Drill, subject: str | None = None, *, dry_run: bool) -> tuple[Verdict, ...]:
        """Take a made-up fault for true; what follows from it. `dry_run`: only say so.

        Raises:
            DrillError: the node has no such GPU or port.
        """
        now_s = self._clock.now_s()
        gpus: list[str] = [gpu.uuid for gpu in self._gpus]
        ports = list(self._spec.ib_ports or sorted(port for port in self._history.ports if "/" in port))
        others: dict[Drill, list[str]] = {Drill.NVML_HANG: [self._node], Drill.IB_FLAP: ports}
        there = others.get(drill, gpus)
        if not there or (subject is not None and subject not in there):
            raise DrillError(f"{drill} needs one of: {', '.join(there) or 'none is there'}\nhint: name it by --subject")
        hot_celsius = self._spec.temperature.limit_celsius + 1
        readings = readings_of(drill, self._node, subject or there[0], hot_celsius, now_s)
        before = {verdict.rule for verdict in self._verdicts}
        judgement = self._judge(readings, now_s)
        if not dry_run:
            logger.warning("health: %s of %s is a drill", drill, subject or there[0])
            self._history = judgement.history
            self._memory.save(self._history)
        return tuple(verdict for verdict in judgement.verdicts if verdict.rule not in before)

    def hang(self, gpu: str | None = None, *, dry_run: bool) -> str:
        """See `stop_a_rank`."""
        return stop_a_rank(self._seats, gpu, dry_run=dry_run)

    def seen(self) -> Seen:
        """What is known now, with the age that each reading has."""
        return Seen(
            node=self._node,
            at_s=self._clock.now_s(),
            readings=tuple(kept.reading for kept in self._latest.everything()),
            findings=tuple(self._findings),
            verdicts=self._verdicts,
            sources={runner.feed.name: runner.error or "" for runner in self._runners},
        )

    def close(self) -> None:
        """Let the sources' threads end; one that hangs stays until the process does."""
        for runner in self._runners:
            runner.close()

    # Look

    async def _look(self) -> list[Reading]:
        """What is new since the last look, the better source's word first."""
        started = [runner for runner in self._runners if runner.start()]
        waited_for = [runner for runner in self._runners if runner.feed.waited_for]
        quick = [runner for runner in started if not runner.feed.lasting]
        await _answered(dict.fromkeys((*waited_for, *quick)), min(_GRACE_S, self._spec.period_s))
        await _answered(waited_for, max(self._spec.period_s - _GRACE_S, 0.0))
        now_s = self._clock.now_s()
        readings: list[Reading] = []
        told: list[tuple[str, float, Reading]] = []
        for rank, runner in enumerate(self._runners):
            seen = runner.take()
            if seen is None:
                continue
            if seen.gpus:
                self._gpus = seen.gpus
                self._inherit(now_s)
            for reading in self._latest.take(seen.readings, runner.feed.name, rank, now_s):
                if reading.signal is Signal.GPU_XID:
                    told.append((runner.feed.name, runner.feed.lag_s, named(reading, self._gpus)))
                else:
                    readings.append(reading)
        self._silent = frozenset(r.feed.name for r in self._runners if r.answer is not None and not r.feed.lasting)
        kernel = self._latest.value(self._node, Signal.KMSG_ANSWERS, now_s, self._silent) is not None
        admitted = self._events.admit(told, kernel_answers=kernel, now_s=now_s)
        return readings + [event for event in admitted if self._is_news(event, now_s)]

    def _inherit(self, now_s: float) -> None:
        """Once, when the first GPUs are listed: what was known of them before this Ray node was."""
        if self._left_behind is None:
            return
        (before, booted), self._left_behind = self._left_behind, None
        gpus, examine = [gpu.uuid for gpu in self._gpus], self._examine is not None
        taken = inherited(before, gpus, self._node, now_s, booted=booted, examine=examine)
        self._history = self._history.with_older(taken)
        # Now: whom a person sets healthy must not be taken over once more.
        self._memory.save(self._history)

    def _is_news(self, event: Reading, now_s: float) -> bool:
        """What happened before this agent began is judged while it is fresh (rules take the same line, read anew, for
        the same event); what is older is told, as history."""
        if event.at_s >= self._began_s or now_s - event.at_s <= EVENT_FRESH_S:
            return True
        text = f"XID {event.value:.0f}, {now_s - event.at_s:.0f} s ago, before the agent began: history"
        text += f"; {event.detail}" if event.detail else ""
        self._findings.append(Finding(at_s=event.at_s, subject=event.subject, what=event.signal, text=text))
        logger.warning("health: %s: %s", event.subject, text)
        return False

    # Judge and remember

    def _judged(self, readings: Sequence[Reading]) -> HealthReport:
        now_s = self._clock.now_s()
        judgement = self._judge([*readings, *step_times(self._seats, self._node, now_s)], now_s)
        before, self._history = self._history, judgement.history
        if self._examine is not None:
            self._history = held_for_burn_in(before, judgement.history, now_s, at_work=self._seats)
        held = awaiting(self._history)
        # Counts of rows that are on their way are not worth a write: losing them costs a sample, not a verdict.
        if judgement.worth_saving:
            self._memory.save(self._history)
        self._log((*judgement.findings, *self._about_sources(now_s)), keep=not readings)
        self._verdicts = (*(v for v in judgement.verdicts if v.rule != BURN_IN), *held)
        if held and (self._examining is None or self._examining.done()) and now_s >= self._examine_next_s:
            self._examining = asyncio.get_running_loop().create_task(self._burn_in(held[0]))
        self._latest.forget(now_s - _FORGET_S)
        return HealthReport(
            node=self._node,
            at_s=now_s,
            gpus=self._inventory(now_s),
            verdicts=self._verdicts,
            source_error=self._inventory_error(),
            compared=compared(self._seats, lambda gpu, signal: self._newest(gpu, signal, now_s), self._spec),
        )

    def _judge(self, readings: Iterable[Reading], now_s: float) -> Judgement:
        gangs = {gpu: seat.claim for gpu, seat in self._seats.items()}
        return judge(readings, self._history, self._spec, now_s, gangs, whole_gangs(self._seats))

    async def _burn_in(self, verdict: Verdict) -> None:
        if self._examine is None:  # the policy has changed: what waits has waited enough
            failed = ""
        else:
            logger.info("health: burn-in of %s", verdict.gpu or verdict.node)
            failed = await self._examine(verdict, len(self._gpus))
        whom, now_s = verdict.gpu or verdict.node, self._clock.now_s()
        text = f"its burn-in failed: {failed}" if failed else "its burn-in passed"
        logger.warning("health: %s: %s", whom, text)
        self._findings.append(Finding(at_s=now_s, subject=whom, what=BURN_IN, text=text))
        self._examine_next_s = now_s + RETRY_S if failed else now_s
        self._history = after_burn_in(self._history, verdict, failed)
        self._memory.save(self._history)

    def _newest(self, gpu: str, signal: Signal, now_s: float) -> Reading | None:
        return self._latest.reading(gpu, signal, now_s, self._silent)

    def _inventory_error(self) -> str | None:
        """Why the list of GPUs is empty or old."""
        runner = next((runner for runner in self._runners if runner.feed.answers is Signal.NVML_ANSWERS), None)
        if runner is None:
            return None
        if runner.error is None and runner.feed.name in self._silent:
            return "NVML: no answer yet"
        return runner.error

    def _about_sources(self, now_s: float) -> list[Finding]:
        """A source that is late or dead is a finding of its own, whether or not a rule asks for it."""
        return [
            Finding(at_s=now_s, subject=self._node, what=f"source:{runner.feed.name}", text=runner.failed)
            for runner in self._runners
            if runner.failed is not None
        ]

    def _inventory(self, now_s: float) -> tuple[GpuSeen, ...]:
        def value(gpu: ListedGpu, signal: Signal) -> float | None:
            return self._latest.value(gpu.uuid, signal, now_s, self._silent)

        return inventory(self._gpus, value, self._seats, self._spec.temperature.implausible_above_celsius)

    def _log(self, findings: tuple[Finding, ...], *, keep: bool) -> None:
        """Each thing is said when it begins or changes, not at each look. `keep`: a look that saw nothing ends none."""
        now = {(finding.subject, finding.what): finding for finding in findings}
        for key, finding in now.items():
            if self._said.get(key) != finding.text:
                logger.warning("health: %s: %s: %s", *key, finding.text)
                self._findings.append(finding)
        said = {key: finding.text for key, finding in now.items()}
        self._said = {**self._said, **said} if keep else said

    # Report

    async def _send(self, report: HealthReport) -> None:
        try:
            self._seats = await self._reporter.report_health(report)
        except NoArbiterError as error:
            # Whoever worked together then may not now: nobody is compared.
            self._seats = {}
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


async def _answered(runners: Iterable[FeedRunner], timeout_s: float) -> None:
    await all_answered([runner.answer for runner in runners if runner.answer is not None], timeout_s)
