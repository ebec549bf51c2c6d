"""A cooled GPU, a node whose fault is over: nobody trains on it again before its burn-in has passed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from pathlib import Path

from tests.health.series import GPU, NODE, SPEC, reading

from tidegate.arbiter.messages import Action, HealthReport, Verdict, When
from tidegate.clock import SystemClock
from tidegate.health.agent import HealthAgent
from tidegate.health.examining import Examine, examination
from tidegate.health.history import BURN_IN, History
from tidegate.health.judge import judge
from tidegate.health.memory import FileMemory
from tidegate.health.node_feeds import nvml_feed
from tidegate.health.readings import Reading, Signal
from tidegate.health.returns import after_burn_in, awaiting, held_for_burn_in
from tidegate.health.sources.nvml import NvmlSource
from tidegate.ids import GpuId, NodeId
from tidegate.spec.policy import BurnInSpec, HealthSpec, TemperatureRule
from tidegate.testing.fake_nvml import NvmlState, uuid_of
from tidegate.testing.memory_arbiter import MemoryArbiter
from waiting import until

QUICK = SPEC.model_copy(update={"temperature": TemperatureRule(release_after_s=1.0)})
HOT = Signal.GPU_TEMPERATURE


def played(*celsius: float, at_work: Collection[GpuId] = ()) -> History:
    history = History()
    for second, value in enumerate(celsius):
        at_s = 1000.0 + second
        after = judge([reading(at_s, HOT, value)], history, QUICK, at_s).history
        history = held_for_burn_in(history, after, at_s, at_work)
    return history


def test_what_has_cooled_is_held_until_its_burn_in_passes() -> None:
    assert awaiting(played(79, 60)) == [], "it is still out for its heat"
    history = played(79, 60, 60)
    [held] = awaiting(history)
    assert (held.rule, held.gpu, held.action, held.when) == (BURN_IN, GPU, Action.EVICT_GPU, When.NOW)
    assert "79 °C" in held.evidence
    failed = after_burn_in(history, held, "gemm_tflops of GPU-0: 300, at least 640")
    assert "at least 640" in awaiting(failed)[0].evidence
    assert awaiting(after_burn_in(failed, awaiting(failed)[0], "")) == []


def test_it_outlives_the_agent_and_a_reboot_and_a_person_may_lift_it() -> None:
    history = History.from_json(played(79, 60, 60).to_json())
    assert len(awaiting(history)) == len(awaiting(history.after_reboot())) == 1
    assert awaiting(history.without(GPU)) == []
    assert awaiting(history.without(NODE)) == []
    assert after_burn_in(History(), awaiting(history)[0], "late") == History(), "a person was quicker"


def test_hot_again_while_it_waits_is_out_for_both() -> None:
    history = played(79, 60, 60, 80)
    rules = {trace.rule for trace in history.traces.values() if trace.standing is not None}
    assert {"temperature", BURN_IN} <= rules
    assert len(awaiting(played(79, 60, 60, 80, 60, 60))) == 1


def test_who_never_left_needs_none() -> None:
    """The brake held its verdict back: it trains all the while."""
    assert awaiting(played(79, 60, 60, at_work={GpuId(GPU)})) == []


class Node:
    """Its agent, over the fake library."""

    def __init__(self, node: NodeId, library: Path, folder: Path, examine: Examine) -> None:
        spec = HealthSpec(period_s=0.02, temperature=TemperatureRule(release_after_s=0.1))
        self.agent = HealthAgent(
            node=node,
            spec=spec,
            feeds=[nvml_feed(NvmlSource(str(library), node=node), spec)],
            reporter=MemoryArbiter(),
            memory=FileMemory(folder / "health.json", "boot-1"),
            meters=NoMeters(),
            clock=SystemClock(),
            examine=examine,
        )

    async def until(self, seen: Callable[[HealthReport], object], what: str) -> HealthReport:
        reports: list[HealthReport] = []

        async def shown() -> object:
            reports.append(await self.agent.tick())
            return seen(reports[-1])

        await until(shown, 10, what)
        return reports[-1]


class NoMeters:
    def show(self, report: HealthReport, readings: Iterable[Reading], tick_s: float) -> None:
        pass


def rules(report: HealthReport) -> list[str]:
    return [verdict.rule for verdict in report.verdicts]


def test_the_agent_lets_it_come_back_when_the_burn_in_has_passed_and_not_before(
    node: NodeId, library: Path, state: NvmlState, tmp_path: Path
) -> None:
    async def story() -> None:
        asked: list[Verdict] = []
        answers = asyncio.Queue[str]()

        async def examine(verdict: Verdict, gpus: int) -> str:
            asked.append(verdict)
            assert gpus == 4
            return await answers.get()

        machine = Node(node, library, tmp_path, examine)
        state.set(1, "temp", 79)
        await machine.until(lambda report: rules(report) == ["temperature"], "hot")
        state.set(1, "temp", 60)
        await machine.until(lambda report: rules(report) != ["temperature"], "it has cooled")
        assert rules(await machine.agent.tick()) == [BURN_IN], "there is no look at which nothing holds it"
        await machine.until(lambda report: asked, "the burn-in begins")
        assert [verdict.gpu for verdict in asked] == [uuid_of("node-a", 1)]
        answers.put_nowait("")
        await machine.until(lambda report: not report.verdicts, "it is back")
        assert machine.agent.seen().findings[-1].text == "its burn-in passed"

    asyncio.run(story())


def test_one_that_fails_stays_out_and_says_why(node: NodeId, library: Path, state: NvmlState, tmp_path: Path) -> None:
    async def story() -> None:
        async def examine(verdict: Verdict, gpus: int) -> str:
            return "bits of GPU-1: x, most have y"

        machine = Node(node, library, tmp_path, examine)
        state.set(1, "temp", 79)
        await machine.until(lambda report: report.verdicts, "hot")
        state.set(1, "temp", 60)
        report = await machine.until(lambda r: any("burn-in failed" in v.evidence for v in r.verdicts), "it failed")
        assert "most have y" in report.verdicts[0].evidence
        assert rules(await machine.agent.tick()) == [BURN_IN]

    asyncio.run(story())


def test_the_examination_itself_runs_in_another_process(node: NodeId, library: Path, state: NvmlState) -> None:
    """What is bad already is found there too; the products are `test_burn_in.py`'s."""
    spec = HealthSpec(nvml_library=str(library))
    examine = examination(spec)
    assert examine is not None
    assert examination(spec.model_copy(update={"burn_in": BurnInSpec(before_return=False)})) is None
    state.set(1, "rows", "0,0,1,0")
    [held] = awaiting(played(79, 60, 60))
    failed = asyncio.run(examine(replace(held, node=node, gpu=GpuId(uuid_of("node-a", 1))), 4))
    assert "row_remap_pending" in failed
