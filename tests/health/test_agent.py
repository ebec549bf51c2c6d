"""The agent over the real nvidia-ml-py and the fake library, with an arbiter that only listens."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest

from tidegate.arbiter.messages import Action, HealthReport, Seat, Verdict
from tidegate.clock import SystemClock
from tidegate.health.agent import HealthAgent, Reporter
from tidegate.health.drills import Drill, DrillError
from tidegate.health.examining import Examine
from tidegate.health.feeds import Feed
from tidegate.health.history import History
from tidegate.health.memory import FileMemory
from tidegate.health.node_feeds import nvml_feed
from tidegate.health.readings import Reading, Round, Signal, Source, Status
from tidegate.health.sources.nvml import NvmlSource
from tidegate.ids import ClaimId, GpuId, NodeId
from tidegate.spec.policy import HealthSpec, RuleOverride, TemperatureRule
from tidegate.testing.fake_nvml import NvmlState, uuid_of
from tidegate.testing.memory_arbiter import MemoryArbiter
from waiting import until, wait_until

SPEC = HealthSpec()


class Dials:
    """Meters that remember what they showed."""

    def __init__(self) -> None:
        self.shown: list[HealthReport] = []
        self.longest_tick_s = 0.0

    def show(self, report: HealthReport, readings: Iterable[Reading], tick_s: float) -> None:
        self.shown.append(report)
        self.longest_tick_s = max(self.longest_tick_s, tick_s)


class Bench:
    """One node's agent with all that it touches."""

    def __init__(self, node: NodeId, library: Path, folder: Path) -> None:
        self.node = node
        self.arbiter = MemoryArbiter()
        self.dials = Dials()
        self.library = str(library)
        self.source = NvmlSource(self.library, node=node, middle_every_s=0.0)
        self.file = folder / "health.json"

    def agent(
        self,
        spec: HealthSpec = SPEC,
        *,
        boot_id: str = "boot-1",
        reporter: Reporter | None = None,
        source: Source | None = None,
        more: Sequence[Feed] = (),
        examine: Examine | None = None,
    ) -> HealthAgent:
        return HealthAgent(
            node=self.node,
            spec=spec,
            feeds=[nvml_feed(source or self.source, spec), *more],
            reporter=reporter or self.arbiter,
            memory=FileMemory(self.file, boot_id),
            meters=self.dials,
            clock=SystemClock(),
            examine=examine,
        )

    def start_ray_anew(self) -> None:
        """The same machine and its GPUs, as a node of another id."""
        self.node, self.file = NodeId("ee" * 28), self.file.with_name("anew.json")
        self.source = NvmlSource(self.library, node=self.node, middle_every_s=0.0)


@pytest.fixture
def bench(node: NodeId, library: Path, state: NvmlState, tmp_path: Path) -> Bench:
    return Bench(node, library, tmp_path)


async def ticks_until(agent: HealthAgent, seen: Callable[[HealthReport], object], what: str) -> HealthReport:
    """Tick until a report shows it, 10 s at most; that report."""
    reports: list[HealthReport] = []

    async def shown() -> object:
        reports.append(await agent.tick())
        return seen(reports[-1])

    await until(shown, 10, f"a report shows {what}")
    return reports[-1]


async def one_that_lost_a_gpu(bench: Bench, state: NvmlState) -> HealthAgent:
    """An agent with a verdict on the first GPU, which answers again."""
    agent = bench.agent()
    await ticks_until(agent, lambda report: report.gpus, "GPUs")
    state.set(0, "error", 15)
    await ticks_until(agent, lambda report: rules(report) == ["gpu_lost"], "the lost GPU")
    state.set(0, "error", 0)
    return agent


def readers() -> int:
    return sum(thread.name == "health-nvml" for thread in threading.enumerate())


def rules(report: HealthReport) -> list[str]:
    return [verdict.rule for verdict in report.verdicts]


def test_the_report_lists_every_gpu_and_none_where_there_is_no_value(bench: Bench, state: NvmlState) -> None:
    state.unset(1, "temp")
    state.set(2, "temp", 255)
    state.set(3, "temp", 77)

    async def story() -> None:
        report = await ticks_until(bench.agent(), lambda report: report.gpus, "GPUs")
        assert [gpu.temperature_celsius for gpu in report.gpus] == [61.0, None, None, 77.0]
        assert [gpu.index for gpu in report.gpus] == [0, 1, 2, 3]
        assert (report.verdicts, report.source_error, report.node) == ((), None, bench.node)
        await until(lambda: bench.arbiter.health, 10, "the report is sent")
        assert bench.arbiter.health == [report]
        assert bench.dials.shown == [report]

    asyncio.run(story())


def test_a_gpu_at_79_is_a_verdict_at_the_next_look(bench: Bench, state: NvmlState) -> None:
    async def story() -> None:
        agent = bench.agent()
        await ticks_until(agent, lambda report: report.gpus, "GPUs")
        state.set(2, "temp", 79)
        report = await agent.tick()
        (verdict,) = report.verdicts
        assert (verdict.gpu, verdict.action) == (uuid_of("node-a", 2), Action.EVICT_GPU)
        # Level-triggered: it is said again for as long as it stands.
        state.set(2, "temp", 75)
        assert (await agent.tick()).verdicts == report.verdicts

    asyncio.run(story())


def test_c101_a_call_that_hangs_is_a_verdict_and_is_never_asked_twice(bench: Bench, state: NvmlState) -> None:
    spec = HealthSpec(period_s=0.05, reading_deadline_s=0.2)

    async def story() -> None:
        agent = bench.agent(spec)
        await ticks_until(agent, lambda report: report.gpus, "GPUs")
        state.set(1, "delay_ms", 60_000)
        hangs_since_s = time.monotonic()
        slow = await ticks_until(agent, lambda report: report.source_error, "that NVML is late")
        assert [gpu.temperature_celsius for gpu in slow.gpus] == [None] * 4, "old values are not shown as new"
        await ticks_until(agent, lambda report: rules(report) == ["nvml_silent_warn"], "the first missed deadline")
        report = await ticks_until(agent, lambda report: "nvml_silent" in rules(report), "the third missed deadline")
        assert time.monotonic() - hangs_since_s >= 3 * spec.reading_deadline_s
        assert [verdict.action for verdict in report.verdicts] == [Action.WARN, Action.EVICT_NODE]
        assert readers() == before + 1
        assert bench.dials.longest_tick_s < 10 * spec.period_s, "the loop never waits for NVML"
        state.set(1, "delay_ms", 0)
        again = await ticks_until(agent, lambda report: report.source_error is None, "that NVML answers again")
        assert again.gpus[1].temperature_celsius == 61.0
        assert "nvml_silent" in rules(again), "one good look does not lift it"
        agent.close()

    before = readers()
    asyncio.run(story())
    wait_until(lambda: readers() == before, 5, "the reader's thread to end")


def test_a_slow_answer_inside_the_deadline_is_no_finding(bench: Bench, state: NvmlState) -> None:
    async def story() -> None:
        state.set(0, "delay_ms", 30)
        spec = HealthSpec(period_s=0.02, reading_deadline_s=10.0)
        report = await ticks_until(bench.agent(spec), lambda report: report.gpus, "GPUs, though late")
        assert report.gpus[0].temperature_celsius == 61.0
        assert report.verdicts == ()

    asyncio.run(story())


def test_the_arbiter_may_be_away(bench: Bench, state: NvmlState, caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        agent = bench.agent()
        bench.arbiter.away = True
        state.set(0, "temp", 79)
        await ticks_until(agent, rules, "the verdict")
        await until(lambda: bench.arbiter.asked, 10, "the verdict is sent")
        for sent in range(bench.arbiter.asked, bench.arbiter.asked + 5):
            await agent.tick()
            await until(lambda sent=sent: bench.arbiter.asked > sent, 10, "the next report is sent")
        assert bench.arbiter.health == []
        assert sum("no arbiter answers" in line for line in caplog.messages) == 1, "said once, not at each look"
        bench.arbiter.away = False
        await agent.tick()
        await until(lambda: bench.arbiter.health, 10, "the arbiter has a report")
        assert rules(bench.arbiter.health[-1]) == ["temperature"]
        assert caplog.messages[-1] == "health: the arbiter answers again"

    asyncio.run(story())


class DeafArbiter:
    """Takes each report and never answers."""

    def __init__(self) -> None:
        self.asked = 0

    async def report_health(self, report: HealthReport) -> None:
        self.asked += 1
        await asyncio.Event().wait()


class BrokenArbiter:
    def __init__(self) -> None:
        self.asked = 0

    async def report_health(self, report: HealthReport) -> None:
        self.asked += 1
        raise RuntimeError("a fault of the arbiter's own")


def test_an_arbiter_that_never_answers_is_asked_once_and_not_waited_for(bench: Bench) -> None:
    async def story() -> None:
        deaf = DeafArbiter()
        agent = bench.agent(reporter=deaf)
        for _ in range(20):
            await agent.tick()
        assert deaf.asked == 1
        assert len(bench.dials.shown) == 20

    asyncio.run(story())


def test_an_arbiter_that_fails_is_told_again(bench: Bench) -> None:
    async def story() -> None:
        broken = BrokenArbiter()
        agent = bench.agent(reporter=broken)
        for sent in range(5):
            await agent.tick()
            await until(lambda sent=sent: broken.asked > sent, 10, "it is told again")
        assert broken.asked == 5

    asyncio.run(story())


def test_a_verdict_outlives_the_agent_and_ends_with_the_boot(bench: Bench, state: NvmlState) -> None:
    async def story() -> None:
        state.set(3, "temp", 79)
        first = await ticks_until(bench.agent(), rules, "the verdict")
        state.set(3, "temp", 72)
        second = await ticks_until(bench.agent(), lambda report: report.gpus, "GPUs")
        assert second.verdicts == first.verdicts
        rebooted = await ticks_until(bench.agent(boot_id="boot-2"), lambda report: report.gpus, "GPUs")
        assert rebooted.verdicts == ()

    asyncio.run(story())


def test_a_verdict_outlives_its_ray_node(bench: Bench, state: NvmlState) -> None:
    """Ray that is started anew on a machine is a node of another id, with the same GPUs. A person's word counts for it
    too: what was set healthy is not taken over once more."""

    async def story() -> None:
        state.set(3, "temp", 79)
        first = await ticks_until(bench.agent(), rules, "the verdict")
        state.set(3, "temp", 72)
        bench.start_ray_anew()
        agent = bench.agent()
        second = await ticks_until(agent, lambda report: report.gpus, "GPUs")
        assert [(v.rule, v.gpu, v.node) for v in second.verdicts] == [
            ("temperature", first.verdicts[0].gpu, bench.node)
        ]
        agent.set_healthy(uuid_of("node-a", 3))
        third = await ticks_until(bench.agent(), lambda report: report.gpus, "GPUs")
        assert third.verdicts == ()

    asyncio.run(story())


@pytest.mark.parametrize(("examined", "held"), [(True, ["burn_in"]), (False, [])])
def test_over_a_boot_what_was_out_is_examined_before_it_comes_back(
    bench: Bench, state: NvmlState, examined: bool, held: list[str]
) -> None:
    asked = []

    async def examine(verdict: Verdict, gpus: int) -> str:
        asked.append((verdict.gpu, verdict.node, gpus))
        return "its products are slow"

    async def story() -> None:
        await one_that_lost_a_gpu(bench, state)
        bench.start_ray_anew()
        anew = bench.agent(boot_id="boot-2", examine=examine if examined else None)
        report = await ticks_until(anew, lambda report: report.gpus, "GPUs")
        assert [verdict.rule for verdict in report.verdicts] == held
        if examined:
            await until(lambda: asked, 10, "it is examined")
            assert asked == [(uuid_of("node-a", 0), bench.node, 4)]

    asyncio.run(story())


def test_a_verdict_is_lifted_when_the_gpu_has_been_cool_for_long_enough(bench: Bench, state: NvmlState) -> None:
    async def story() -> None:
        agent = bench.agent(
            HealthSpec(period_s=0.02, reading_deadline_s=5.0, temperature=TemperatureRule(release_after_s=0.2))
        )
        state.set(3, "temp", 79)
        await ticks_until(agent, rules, "the verdict")
        state.set(3, "temp", 70)
        assert rules(await agent.tick()) == ["temperature"]
        await ticks_until(agent, lambda report: not report.verdicts, "no verdict")

    asyncio.run(story())


def test_a_person_can_set_a_lost_gpu_healthy(bench: Bench, state: NvmlState) -> None:
    async def story() -> None:
        agent = await one_that_lost_a_gpu(bench, state)
        await agent.tick()
        assert rules(await agent.tick()) == ["gpu_lost"]
        agent.set_healthy(uuid_of("node-a", 0))
        assert rules(await agent.tick()) == []
        assert FileMemory(bench.file, "boot-1").load().traces == {}, "it is forgotten on disk too"

    asyncio.run(story())


def test_a_node_without_nvml_says_so_and_is_only_warned_about(bench: Bench, tmp_path: Path) -> None:
    async def story() -> None:
        absent = NvmlSource(str(tmp_path / "no-such-library.so.1"), node=bench.node)
        report = await bench.agent(source=absent).tick()
        assert report.gpus == ()
        assert report.source_error is not None
        assert "LIBRARY_NOT_FOUND" in report.source_error
        assert [verdict.action for verdict in report.verdicts] == [Action.WARN]

    asyncio.run(story())


@pytest.mark.parametrize("torn", [b"", b"{", b'{"boot_id": "boot-1"}', b"\xff\xfe"])
def test_a_torn_memory_is_an_empty_one(tmp_path: Path, torn: bytes) -> None:
    (tmp_path / "health.json").write_bytes(torn)
    assert FileMemory(tmp_path / "health.json", "boot-1").load() == History()


def test_a_disk_that_can_not_be_written_does_not_silence_the_agent(bench: Bench, state: NvmlState) -> None:
    async def story() -> None:
        bench.file.mkdir()
        state.set(0, "temp", 79)
        await ticks_until(bench.agent(), rules, "the verdict")

    asyncio.run(story())


class StuckSource:
    """Hangs until it is told to come back."""

    def __init__(self) -> None:
        self.asked = 0
        self.come_back = threading.Event()

    def read(self) -> Round:
        self.asked += 1
        self.come_back.wait(30)
        return Round(readings=())


class BrokenSource:
    def read(self) -> Round:
        raise ZeroDivisionError("a fault of our own")


def test_a_source_that_dies_is_a_finding_and_takes_nothing_along(
    bench: Bench, state: NvmlState, caplog: pytest.LogCaptureFixture
) -> None:
    spec = HealthSpec(period_s=0.02)
    broken = Feed(name="infiniband", source=BrokenSource(), answers=Signal.IB_ANSWERS, period_s=0.02, deadline_s=1.0)

    async def story() -> None:
        agent = bench.agent(spec, more=[broken])
        state.set(0, "temp", 79)
        await ticks_until(agent, rules, "the verdict that NVML's reading raises")
        await ticks_until(agent, lambda _: agent.seen().sources["infiniband"], "what the dead source died of")
        assert [f.what for f in agent.seen().findings if f.what.startswith("source:")] == ["source:infiniband"]
        assert "ZeroDivisionError: a fault of our own" in agent.seen().sources["infiniband"]
        for _ in range(5):
            assert (await agent.tick()).gpus[0].temperature_celsius == 79.0
        assert sum("source infiniband" in line for line in caplog.messages) == 1, "said once, with its traceback"
        agent.close()

    asyncio.run(story())


def test_a_source_that_hangs_is_a_finding_and_holds_up_nobody(bench: Bench, state: NvmlState) -> None:
    spec = HealthSpec(period_s=0.02, reading_deadline_s=0.1)
    stuck = StuckSource()
    hung = Feed(name="host", source=stuck, answers=Signal.HOST_ANSWERS, period_s=0.02, deadline_s=0.1)

    async def story() -> None:
        agent = bench.agent(spec, more=[hung])
        await ticks_until(agent, lambda _: agent.seen().sources["host"], "that the source is late")
        late = [reading for reading in agent.seen().readings if reading.signal is Signal.HOST_ANSWERS]
        assert [(reading.value, reading.status, reading.cause) for reading in late] == [
            (None, Status.TIMEOUT, "DEADLINE_MISSED")
        ]
        state.set(1, "temp", 79)
        report = await agent.tick()
        assert rules(report) == ["temperature"]
        assert report.source_error is None, "the list of GPUs has no gap"
        assert stuck.asked == 1, "a call that hangs is not joined by another"
        stuck.come_back.set()
        await ticks_until(agent, lambda _: not agent.seen().sources["host"], "that it answers again")
        agent.close()

    asyncio.run(story())


def test_the_loop_keeps_its_period(bench: Bench) -> None:
    async def story() -> None:
        running = asyncio.create_task(bench.agent(HealthSpec(period_s=0.05)).run())
        started_s = time.monotonic()
        await until(lambda: len(bench.dials.shown) >= 11, 10, "eleven looks")
        assert time.monotonic() - started_s >= 0.48, "ten periods"
        running.cancel()

    asyncio.run(story())


def test_gpus_are_compared_while_the_arbiter_says_that_they_work_together(bench: Bench, state: NvmlState) -> None:
    async def story() -> None:
        at_once = {"sm_clock_warn": RuleOverride(for_s=0.0)}
        agent = bench.agent(SPEC.model_copy(update={"rules": at_once}))
        for index in range(4):
            state.set(index, "processes", 1)
        state.set(2, "clock.1", 1200)
        await ticks_until(agent, lambda report: report.gpus, "GPUs")
        for _ in range(3):
            assert rules(await agent.tick()) == [], "nobody works together yet"
        bench.arbiter.seats = {GpuId(uuid_of("node-a", index)): Seat(claim=ClaimId("run")) for index in range(4)}
        report = await ticks_until(agent, lambda report: rules(report) == ["sm_clock_warn"], "the slow one")
        assert report.verdicts[0].gpu == uuid_of("node-a", 2)

    asyncio.run(story())


def test_a_drill_says_what_would_follow_and_only_without_dry_run_it_does(bench: Bench, state: NvmlState) -> None:
    async def story() -> None:
        agent = bench.agent()
        await ticks_until(agent, lambda report: report.gpus, "GPUs")
        gpu = uuid_of("node-a", 1)
        [would] = agent.drill(Drill.HOT_GPU, gpu, dry_run=True)
        assert (would.rule, would.gpu) == ("temperature", gpu)
        assert rules(await agent.tick()) == []
        [verdict] = agent.drill(Drill.HOT_GPU, gpu, dry_run=False)
        assert verdict.evidence == "79 °C, limit 78 °C (a drill)"
        assert rules(await agent.tick()) == ["temperature"]
        with pytest.raises(DrillError, match="needs one of: GPU-"):
            agent.drill(Drill.XID, "GPU-nowhere", dry_run=True)
        with pytest.raises(DrillError, match="none is there"):
            agent.drill(Drill.IB_FLAP, dry_run=True)

    asyncio.run(story())
