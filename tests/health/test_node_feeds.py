"""All sources of a node together under one agent: the production path without a GPU, a card or Ray."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path

import pytest
from test_infiniband_source import sample

from tidegate.arbiter.messages import Action, HealthReport
from tidegate.clock import SystemClock
from tidegate.health.agent import HealthAgent
from tidegate.health.memory import FileMemory
from tidegate.health.node_feeds import feeds_of
from tidegate.health.readings import CEILINGS, EVENTS, Reading, Signal
from tidegate.ids import NodeId
from tidegate.spec.policy import HealthSpec, SourcesSpec
from tidegate.testing.fake_nvml import NvmlState, uuid_of
from tidegate.testing.memory_arbiter import MemoryArbiter
from waiting import until


class Dials:
    """Keeps the events and the newest readings that people would see."""

    def __init__(self) -> None:
        self.events: list[Reading] = []
        self.now: dict[tuple[str, Signal], Reading] = {}

    def show(self, report: HealthReport, readings: Iterable[Reading], tick_s: float) -> None:
        seen = list(readings)
        self.events += [reading for reading in seen if reading.signal in EVENTS]
        self.now = {(r.subject, r.signal): r for r in seen}


class Node:
    def __init__(
        self, agent: HealthAgent, dials: Dials, state: NvmlState, folder: Path, again: Callable[[], Node]
    ) -> None:
        self.agent, self.dials, self.state = agent, dials, state
        self.ports, self.kmsg = folder / "h100-host", folder / "kmsg"
        self.again = again

    async def until(self, seen: Callable[[HealthReport], object], what: str) -> HealthReport:
        reports: list[HealthReport] = []

        async def shown() -> object:
            reports.append(await self.agent.tick())
            return seen(reports[-1])

        await until(shown, 10, what)
        return reports[-1]


@pytest.fixture
def machine(tmp_path: Path, library: Path, state: NvmlState, node: NodeId) -> Node:
    """Four H100s, the real tree of nine ports with counters at their ceilings, an empty kernel log."""
    tree = sample("h100-host", tmp_path)
    (tmp_path / "kmsg").touch()
    spec = HealthSpec(
        period_s=0.05,
        nvml_library=str(library),
        sources=SourcesSpec(
            ib_root=str(tree),
            kmsg=str(tmp_path / "kmsg"),
            dcgm_url="http://127.0.0.1:9/metrics",
            disks=(str(tmp_path),),
        ),
    )

    def begun() -> Node:
        dials = Dials()
        agent = HealthAgent(
            node=node,
            spec=spec,
            feeds=feeds_of(spec, node),
            reporter=MemoryArbiter(),
            memory=FileMemory(tmp_path / "health.json", "boot-1"),
            meters=dials,
            clock=SystemClock(),
        )
        return Node(agent, dials, state, tmp_path, begun)

    return begun()


def test_a_real_host_with_saturated_counters_is_read_whole_and_evicts_nothing(machine: Node, node: NodeId) -> None:
    async def story() -> None:
        signals = (Signal.IB_ANSWERS, Signal.KMSG_ANSWERS, Signal.HOST_ANSWERS, Signal.NVML_ANSWERS)
        report = await machine.until(
            lambda _: all((node, signal) in machine.dials.now for signal in signals), "all sources answer"
        )
        stuck = [r for r in machine.dials.now.values() if r.value is not None and r.value == CEILINGS.get(r.signal)]
        assert len(stuck) >= 8
        assert [verdict for verdict in report.verdicts if verdict.action is not Action.WARN] == []
        assert len(report.gpus) == 4
        trouble = {name: error for name, error in machine.agent.seen().sources.items() if error}
        assert set(trouble) <= {"dcgm"}, "no exporter runs here, and nothing is missed"
        machine.agent.close()

    asyncio.run(story())


def test_an_xid_that_kernel_and_driver_tell_is_one_event_under_the_gpus_name(machine: Node) -> None:
    async def story() -> None:
        await machine.until(
            lambda report: report.gpus and (report.node, Signal.KMSG_ANSWERS) in machine.dials.now, "up"
        )
        machine.state.set(2, "xid_seq", "1:145")
        with machine.kmsg.open("a") as log:
            log.write("4,1,1,-;NVRM: Xid (PCI:0000:1a:00): 145, RLW_REMAP Nonfatal XC0 i0 Link 00 (0x4 0x1)\n")
        await machine.until(lambda _: machine.dials.events, "the event")
        # A second one, told later, shows that whatever the first one's echo was has been dropped by then.
        machine.state.set(1, "xid_seq", "1:31")
        await machine.until(
            lambda _: len(machine.dials.events) > 1, "what only the driver tells, without a kernel line"
        )
        first, second = machine.dials.events
        assert (first.subject, first.value) == (uuid_of("node-a", 2), 145.0)
        assert first.detail is not None
        assert first.detail.startswith("RLW_REMAP Nonfatal"), "the kernel's words, not the driver's bare number"
        assert (second.subject, second.value, second.detail) == (uuid_of("node-a", 1), 31.0, None)
        machine.agent.close()

    asyncio.run(story())


@pytest.mark.parametrize(("ago_s", "verdicts"), [(20.0, ["xid_off_the_bus"]), (3600.0, [])])
def test_an_xid_from_before_the_agent_is_acted_on_while_fresh_and_else_only_told(
    machine: Node, ago_s: float, verdicts: list[str]
) -> None:
    async def story() -> None:
        when = datetime.fromtimestamp(time.time() - ago_s).astimezone().isoformat(timespec="microseconds")
        machine.kmsg.write_text(f"{when} NVRM: Xid (PCI:0000:1a:00): 79, GPU has fallen off the bus.\n")
        report = await machine.until(
            lambda report: report.verdicts or any(f.what == Signal.GPU_XID for f in machine.agent.seen().findings),
            "it is told",
        )
        assert [v.rule for v in report.verdicts if v.action is not Action.WARN] == verdicts
        machine.agent.close()

    asyncio.run(story())


def test_an_agent_that_begins_anew_does_not_count_the_same_line_twice(machine: Node, tmp_path: Path) -> None:
    """An XID of the application's class: the first is nothing, the second of a day takes the GPU out. The kernel's time
    is since boot: on the wall clock the same line is a little elsewhere for each reader."""

    def write(ago_s: float, xid: int = 31) -> None:
        when = datetime.fromtimestamp(began_s - ago_s).astimezone().isoformat(timespec="microseconds")
        machine.kmsg.write_text(f"{when} NVRM: Xid (PCI:0000:1a:00): {xid}, pid=1, name=python\n")

    began_s = time.time()

    async def judged(node: Node) -> list[str]:
        await node.until(
            lambda report: report.gpus and (report.node, Signal.KMSG_ANSWERS) in node.dials.now, "it looks"
        )
        for _ in range(10):
            report = await node.agent.tick()
        node.agent.close()
        return [verdict.rule for verdict in report.verdicts if verdict.action is not Action.WARN]

    async def story() -> None:
        write(20.0)
        assert await judged(machine) == []
        write(19.8)
        assert await judged(machine.again()) == [], "the same line"
        write(10.0)
        assert await judged(machine.again()) == ["xid_page_fault_repeated"], "another one, while no agent ran"

    asyncio.run(story())


def test_a_port_that_goes_down_is_seen_at_the_next_looks(machine: Node) -> None:
    async def story() -> None:
        key = ("mlx5_0/1", Signal.IB_PORT_STATE)
        await machine.until(lambda _: key in machine.dials.now, "the port")
        (machine.ports / "mlx5_0" / "ports" / "1" / "state").write_text("1: DOWN\n")
        await machine.until(lambda _: machine.dials.now[key].value == 1.0, "the port's fall")
        machine.agent.close()

    asyncio.run(story())
