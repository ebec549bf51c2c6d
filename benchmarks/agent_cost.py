"""What a node's health agent costs: CPU and memory with 8 GPUs × 18 NVLinks × 9 InfiniBand ports at one look a second.

The agent runs as on a node, with all its sources, in a process of its own for each round: the real nvidia-ml-py over
the fake NVML library, a sysfs tree of real files, a kernel log that is followed. The arbiter only takes its reports,
and no Ray is there: the series are worked out but not handed to Ray's metrics. The event loop is uvloop's, as that of
Ray's actors. CPU is that of the whole process, the fake library's own work and every thread included.

Its note says what a loop takes that reads the same sources at the same periods, one after the other in one thread, and
does nothing with what they say: below that no agent in Python could go.

Its growth with GPUs is the exponent over 1, 2, 4, 8 and 16 of them, from looks that follow each other without a rest.

Takes about 25 s a round.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import uvloop
from benchmarks.contract import Metric, figure, growth_exponent, publish

from tidegate.arbiter.messages import HealthReport, Seat
from tidegate.clock import SystemClock
from tidegate.health.agent import HealthAgent
from tidegate.health.history import History
from tidegate.health.node_feeds import feeds_of
from tidegate.health.readings import Reading
from tidegate.health.series import XidCount, series_of
from tidegate.health.sources.saying import Every
from tidegate.ids import GpuId, NodeId
from tidegate.spec.policy import HealthSpec, SourcesSpec
from tidegate.testing import fake_nvml
from tidegate.testing.fake_nvml import NvmlState, gpus_of

NODE = NodeId("c0" * 28)
GPUS = 8
PORTS = 9
SIZES = (1, 2, 4, 8, 16)
LOOKS = 60
"""Without a rest, for the growth; the slower sources come as often as their periods say, which is hardly at all."""
SECONDS = 10.0
"""Of one look a second: the counters of every five are in it twice, those of every minute once."""
CORE_SHARE_GOAL = "<= 0.002"
"""0.2 % of a core."""

COUNTERS = (
    "symbol_error",
    "link_error_recovery",
    "link_downed",
    "port_rcv_errors",
    "port_rcv_remote_physical_errors",
    "port_rcv_switch_relay_errors",
    "port_xmit_discards",
    "port_xmit_constraint_errors",
    "port_rcv_constraint_errors",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
    "VL15_dropped",
    "port_xmit_wait",
    "port_rcv_data",
    "port_xmit_data",
)
HW_COUNTERS = (
    "out_of_sequence",
    "packet_seq_err",
    "local_ack_timeout_err",
    "rnr_nak_retry_err",
    "roce_slow_restart",
    "np_cnp_sent",
    "rp_cnp_handled",
    "out_of_buffer",
)


class Ear:
    """Takes the reports."""

    async def report_health(self, report: HealthReport) -> Mapping[GpuId, Seat]:
        return {}


class Nothing:
    """Remembers nothing: a healthy node has nothing to remember."""

    def load(self) -> History:
        return History()

    def save(self, history: History) -> None:
        return None

    def left_behind(self) -> None:
        return None


class Shelf:
    """Meters that work out the series, as often as those on Ray."""

    def __init__(self) -> None:
        self._due = Every(5.0)
        self.looks = 0
        self.series = 0

    def show(self, report: HealthReport, readings: Iterable[Reading], tick_s: float) -> None:
        self.looks += 1
        if self._due.due(report.at_s):
            self.series = len(series_of(report, readings, XidCount(), tick_s))


def machine(folder: Path, gpus: int) -> HealthSpec:
    """A node of files: what its agent reads, and what it is told to read."""
    library = fake_nvml.build(folder)
    NvmlState(folder / "nvml.state", gpus_of("node", gpus))
    os.environ[fake_nvml.STATE_VARIABLE] = str(folder / "nvml.state")
    for index in range(PORTS):
        port = folder / "infiniband" / f"mlx5_{index}" / "ports" / "1"
        states = {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": "400 Gb/sec (4X NDR)"}
        states |= {"link_layer": "InfiniBand"}
        files = {**states, **{f"counters/{name}": "0" for name in COUNTERS}}
        files |= {f"hw_counters/{name}": "0" for name in HW_COUNTERS}
        for name, text in files.items():
            (port / name).parent.mkdir(parents=True, exist_ok=True)
            (port / name).write_text(text + "\n")
    (folder / "kmsg").touch()
    return HealthSpec(
        nvml_library=str(library),
        sources=SourcesSpec(
            ib_root=str(folder / "infiniband"), kmsg=str(folder / "kmsg"), dcgm_url=None, disks=(str(folder),)
        ),
    )


def agent_of(spec: HealthSpec, shelf: Shelf) -> HealthAgent:
    return HealthAgent(
        node=NODE,
        spec=spec,
        feeds=feeds_of(spec, NODE),
        reporter=Ear(),
        memory=Nothing(),
        meters=shelf,
        clock=SystemClock(),
    )


async def at_one_a_second(spec: HealthSpec) -> tuple[float, float, int]:
    """CPU seconds a second, the most memory in bytes, and series, after a first look has opened everything."""
    shelf = Shelf()
    agent = agent_of(spec, shelf)
    await agent.tick()
    running = asyncio.create_task(agent.run())
    await asyncio.sleep(0.5)
    cpu_s, began_s = time.process_time(), time.perf_counter()
    await asyncio.sleep(SECONDS)
    share = (time.process_time() - cpu_s) / (time.perf_counter() - began_s)
    if running.done():
        running.result()
    running.cancel()
    if shelf.looks < SECONDS:
        raise RuntimeError(f"the agent looked {shelf.looks} times in {SECONDS:g} s")
    return share, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0, shelf.series


def reads_alone(spec: HealthSpec) -> float:
    """CPU seconds a second of the same reads, with nothing made of them."""
    due = [(feed.source, Every(feed.period_s)) for feed in feeds_of(spec, NODE) if not feed.lasting]
    for source, _ in due:
        source.read()
    cpu_s, began_s = time.process_time(), time.perf_counter()
    while (at_s := time.perf_counter() - began_s) < SECONDS:
        for source, every in due:
            if every.due(at_s):
                source.read()
        time.sleep(1.0 - at_s % 1.0)
    return (time.process_time() - cpu_s) / (time.perf_counter() - began_s)


async def in_a_row(spec: HealthSpec) -> float:
    """CPU seconds of one look."""
    agent = agent_of(spec, Shelf())
    await agent.tick()
    cpu_s = time.process_time()
    for _ in range(LOOKS):
        await agent.tick()
    return (time.process_time() - cpu_s) / LOOKS


def alone(what: str, gpus: int) -> list[float]:
    """One measurement in a fresh process: NVML's library and its state belong to one each."""
    command = [sys.executable, "-m", "benchmarks.agent_cost", "--alone", what, str(gpus)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [float(word) for word in done.stdout.split()]


def here(what: str, gpus: int) -> str:
    with tempfile.TemporaryDirectory(prefix="tg-agent-cost-") as folder:
        spec = machine(Path(folder), gpus)
        if what == "second":
            return " ".join(str(number) for number in uvloop.run(at_one_a_second(spec)))
        if what == "reads":
            return str(reads_alone(spec))
        return str(uvloop.run(in_a_row(spec)))


def measure(rounds: int) -> dict[str, Metric]:
    shares, floors, resident, exponents, series = [], [], [], [], []
    for number in range(rounds + 1):
        share, most_bytes, count = alone("second", GPUS)
        floor = alone("reads", GPUS)[0]
        looks_s = [alone("row", size)[0] for size in SIZES]
        exponent = growth_exponent(SIZES, looks_s)
        shown = ", ".join(f"{size}: {one * 1e3:.2f} ms" for size, one in zip(SIZES, looks_s, strict=True))
        cost = f"{share:.5f} cores ({floor:.5f} for reads alone), {most_bytes / 2**20:.0f} MiB"
        print(f"round {number or 'warm-up'}: {cost}; {shown}; ^{exponent:.2f}")
        if number:
            shares.append(share)
            floors.append(floor)
            resident.append(most_bytes / 2**20)
            exponents.append(exponent)
            series.append(count)
    return {
        "cores": figure(
            shares,
            goal=CORE_SHARE_GOAL,
            note=f"{GPUS} GPUs, 18 links each, {PORTS} ports, 1 Hz; the fake library's own work is in it, Ray's is not"
            f"; the same reads in one thread, with nothing made of them: {statistics.median(floors):.4f}",
        ),
        "resident_mib": figure(
            resident, goal="<= 200", note="the process without Ray; an actor's own Ray worker is about 100 MiB more"
        ),
        "growth_exponent": figure(exponents, goal="<= 1.1", note="CPU of one look from 1 GPU to 16"),
        "series": figure(series, goal="<= 1000", note="of one node in Prometheus"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="after a warm-up; fewer than 5 are not kept")
    parser.add_argument("--alone", nargs=2, metavar=("WHAT", "GPUS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        print(here(options.alone[0], int(options.alone[1])))
        return
    publish("agent_cost", measure(options.rounds), rounds=options.rounds, packages=("nvidia-ml-py", "pydantic"))


if __name__ == "__main__":
    main()
