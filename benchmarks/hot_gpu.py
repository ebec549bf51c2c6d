"""Seconds from a GPU's reading crossing 78 °C to the process of its rank being gone, on a real local cluster.

* ours: the submitted job of two ranks on a node of four logical GPUs, with arbiter and health agents at their default
  period of 1 s. The temperature in the fake NVML library's file crosses the limit; the rank's process is watched by its
  pidfd. After each the GPU is cooled and pardoned, and the gang steps again before the next.
* the peer: the same rule over an exporter (`contenders/exporter_loop.py`). At dcgm-exporter's `default` it collects
  every 30 s; at `equal` every second, as ours. Its page is scraped every second by a watcher that kills at once, on the
  same machine; what it kills is a bare process, which is the least that killing can cost.

Crossings are spread evenly over a period, shifted a little from round to round, and so are the peer's scrapes between
two of its collections, so that the mean is not luck: what is measured is half a period and what the
way from the reading to the kill adds. The excess is over ours' whole period, at the 99th percentile of all rounds.

Takes about eight minutes on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from benchmarks.contenders import turns
from benchmarks.contract import Metric, compared, figure, publish
from benchmarks.fault_to_step import make_inputs

from benchmarks import arena
from tidegate.arbiter.client import ArbiterClient
from tidegate.cli.connect import connect
from tidegate.json_lines import read_lines
from tidegate.testing import fake_nvml
from tidegate.testing.fake_nvml import NvmlState, gpus_of, uuid_of
from tidegate.testing.local_cluster import LocalCluster

NODES = ("node-a",)
GPUS_PER_NODE = 4
RANKS = 2
COOL_CELSIUS, HOT_CELSIUS, LIMIT_CELSIUS = 61, 79, 78
PERIOD_S = 1.0
DEFAULT_S = 30.0
"""dcgm-exporter's --collect-interval."""
STRIKES = 12
"""Of ours in a round; of the peer's in each of its periods as many as it has GPUs."""
PEER_GPUS = 8
EQUAL_PERIODS = 3
EXCESS_GOAL = "<= 0.15"
QUANTILE = 0.99


@dataclass(slots=True)
class Found:
    """Seconds of each strike, round by round."""

    ours: list[list[float]] = field(default_factory=list)
    default: list[list[float]] = field(default_factory=list)
    equal: list[list[float]] = field(default_factory=list)


# Ours


class OurGang:
    """The run while it goes on: hit a rank's GPU, see its process go."""

    def __init__(self, run: turns.Run, state: NvmlState) -> None:
        self._run, self._state = run, state
        self._arbiter = ArbiterClient(timeout_s=20.0)
        self._indices = {uuid_of(NODES[0], index): index for index in range(GPUS_PER_NODE)}

    def strike(self, rank: int, phase_s: float) -> float:
        """Let the GPU of a rank run hot `phase_s` after a whole period of this machine's clock."""
        gang = self._stepping()
        gpu, pid = gang["gpus"][rank], gang["pids"][rank]
        with _watched(pid) as gone:
            rest_s = (phase_s - time.time()) % PERIOD_S
            time.sleep(rest_s)
            self._state.set(self._indices[gpu], "temp", HOT_CELSIUS)
            crossed_s = time.monotonic()
            took_s = gone(turns.DEADLINE_S) - crossed_s
        self._state.set(self._indices[gpu], "temp", COOL_CELSIUS)
        self._pardoned(gpu)
        return took_s

    def _stepping(self) -> dict[str, Any]:
        """The gang, once a step of its present generation is done."""
        deadline_s = time.monotonic() + turns.DEADLINE_S
        while time.monotonic() < deadline_s:
            gangs = [g for g in asyncio.run(self._arbiter.status())["gangs"] if g["phase"] == "running"]
            steps = list(read_lines(self._run.run_dir / "metrics.jsonl"))
            if len(gangs) == 1 and steps and steps[-1]["generation"] == gangs[0]["gang_generation"]:
                gang: dict[str, Any] = gangs[0]
                if len(gang["pids"]) == RANKS and None not in gang["pids"]:
                    return gang
            time.sleep(0.05)
        raise turns.TurnError(f"{self._run.run_dir}: the gang is not back\n{self._log()}")

    def _pardoned(self, gpu: str) -> None:
        """The verdict stands until the agent has read the cool GPU, and would be raised anew before."""
        deadline_s = time.monotonic() + turns.DEADLINE_S
        while time.monotonic() < deadline_s:
            verdicts = [v for v in asyncio.run(self._arbiter.status())["quarantines"] if gpu in json.dumps(v)]
            if not verdicts:
                return
            time.sleep(PERIOD_S)
            asyncio.run(self._arbiter.pardon(gpu, "cooled by the benchmark"))
        raise turns.TurnError(f"{gpu} stays in quarantine")

    def _log(self) -> str:
        return (self._run.run_dir / turns.LOG).read_text(errors="replace")[-2000:]


@contextlib.contextmanager
def _watched(pid: int) -> Iterator[Callable[[float], float]]:
    """Yields a function that waits until the process is gone and says when that was, on the monotonic clock."""
    descriptor = os.pidfd_open(pid)
    try:

        def gone(timeout_s: float) -> float:
            if not select.select([descriptor], [], [], timeout_s)[0]:
                raise turns.TurnError(f"process {pid} is still there after {timeout_s:.0f} s")
            return time.monotonic()

        yield gone
    finally:
        os.close(descriptor)


# The peer


def by_exporter(folder: Path, library: Path, collect_every_s: float, periods: int, shift: float) -> list[float]:
    """One hot GPU after the other, evenly over each period. `shift`, 0 to 1: where between two of these instants they
    are, and when in its period the page is scraped."""
    folder.mkdir(parents=True)
    state_path, victims_path = folder / "nvml.state", folder / "victims.json"
    victims_path.write_text("{}", encoding="utf-8")
    state = NvmlState(state_path, gpus_of("peer", PEER_GPUS))
    command = [sys.executable, "-m", "benchmarks.contenders.exporter_loop", "--library", str(library)]
    command += ["--victims", str(victims_path), "--limit", str(LIMIT_CELSIUS)]
    command += ["--collect-every", str(collect_every_s), "--scrape-every", str(PERIOD_S)]
    command += ["--scrape-after", str(shift * PERIOD_S)]
    environment = {**os.environ, fake_nvml.STATE_VARIABLE: str(state_path)}
    loop = subprocess.Popen(command, cwd=arena.ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert loop.stdout is not None
        loop.stdout.readline()
        time.sleep(2 * PERIOD_S)  # its first page is collected and scraped
        return [took_s for _ in range(periods) for took_s in _peer_period(state, victims_path, collect_every_s, shift)]
    finally:
        loop.kill()
        loop.wait()


def _peer_period(state: NvmlState, victims_path: Path, collect_every_s: float, shift: float) -> list[float]:
    victims = [subprocess.Popen(["sleep", "3600"]) for _ in range(PEER_GPUS)]
    pids = {uuid_of("peer", index): victim.pid for index, victim in enumerate(victims)}
    victims_path.write_text(json.dumps(pids), encoding="utf-8")
    took_s = [0.0] * PEER_GPUS
    watchers = []
    started_s = time.monotonic()
    for index, victim in enumerate(victims):
        time.sleep(max(started_s + (index + shift) / PEER_GPUS * collect_every_s - time.monotonic(), 0.0))

        def watch(index: int = index, victim: subprocess.Popen[bytes] = victim) -> None:
            crossed_s = time.monotonic()
            with _watched(victim.pid) as gone:
                took_s[index] = gone(3 * DEFAULT_S) - crossed_s

        state.set(index, "temp", HOT_CELSIUS)
        watcher = threading.Thread(target=watch)
        watcher.start()
        watchers.append(watcher)
    for watcher, victim in zip(watchers, victims, strict=True):
        watcher.join()
        victim.wait()
    victims_path.write_text("{}", encoding="utf-8")
    state.set_all("temp", COOL_CELSIUS)
    for index in range(PEER_GPUS):
        state.set(index, "temp", COOL_CELSIUS)
    time.sleep(2 * collect_every_s if collect_every_s < DEFAULT_S else 0.0)  # the next period's page is cool
    return took_s


# All of it


def play(found: Found, gang: OurGang, here: Path, library: Path, strikes: int, shift: float) -> None:
    """One round. The peer at its default mostly sleeps: it has its period while ours has its turns."""
    default: list[float] = []
    sleeper = threading.Thread(
        target=lambda: default.extend(by_exporter(here / "default", library, DEFAULT_S, 1, shift))
    )
    sleeper.start()
    ours = [gang.strike(strike % RANKS, (strike + shift) / strikes * PERIOD_S) for strike in range(strikes)]
    sleeper.join()
    equal = by_exporter(here / "equal", library, PERIOD_S, EQUAL_PERIODS, shift)
    print(
        f"{here.name}: ours {statistics.mean(ours):.3f} s (most {max(ours):.3f}), "
        f"exporter at 30 s {statistics.mean(default):.2f}, at 1 s {statistics.mean(equal):.3f}",
        flush=True,
    )
    found.ours.append(ours)
    found.default.append(default)
    found.equal.append(equal)


def measure(folder: Path, base_port: int, rounds: int, strikes: int) -> Found:
    inputs = make_inputs(folder)
    environment = arena.fake_gpus(folder / "nvml", NODES, GPUS_PER_NODE)
    library = folder / "nvml" / fake_nvml.LIBRARY
    found = Found()
    with arena.cluster(base_port, (GPUS_PER_NODE,) * len(NODES), environment) as cluster:
        arena.start_control_plane(arena.write_policy(folder, serving={"protect": False}), cluster.address)
        connect(cluster.address)
        try:
            _measure_on(cluster, found, inputs, folder, library, rounds, strikes)
        finally:
            ray.shutdown()
    return found


def _measure_on(
    cluster: LocalCluster, found: Found, inputs: turns.Inputs, folder: Path, library: Path, rounds: int, strikes: int
) -> None:
    state = NvmlState(folder / "nvml" / f"{NODES[0]}.state")
    with turns.ours(inputs, folder / "run", cluster, ranks=RANKS) as run:
        gang = OurGang(run, state)
        for strike in range(3):
            gang.strike(strike % RANKS, 0.0)  # warm-up
        for number in range(rounds):
            play(found, gang, folder / f"round {number + 1}", library, strikes, (number + 0.5) / rounds)


def metrics_of(found: Found) -> dict[str, Metric]:
    ours = [statistics.mean(took) for took in found.ours]

    def over(theirs: Sequence[Sequence[float]], goal: str) -> Metric:
        means = [statistics.mean(took) for took in theirs]
        return compared(ours, means, role="peer", ratio="theirs / ours", goal=goal)

    every = sorted(took for took_s in found.ours for took in took_s)
    last = every[min(int(QUANTILE * len(every)), len(every) - 1)]
    note = f"p99 of {len(every)} crossings at a period of {PERIOD_S:g} s; the most is {every[-1] - PERIOD_S:.3f}"
    return {
        "excess_over_period_s": figure([last - PERIOD_S], goal=EXCESS_GOAL, note=note),
        "sooner_than_30s_loop": over(found.default, ">= 25"),
        "sooner_than_equal_loop": over(found.equal, ">= 1"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="after a warm-up; fewer than 5 are not kept")
    parser.add_argument("--strikes", type=int, default=STRIKES, help=f"of ours in a round (default {STRIKES})")
    parser.add_argument("--base-port", type=int, default=7630, help="two ports from here on are used")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-") as folder:
        found = measure(Path(folder), arguments.base_port, arguments.rounds, arguments.strikes)
    whole = arguments.strikes >= STRIKES
    packages = ("tidegate", "ray", "nvidia-ml-py")
    publish("hot_gpu", metrics_of(found), rounds=arguments.rounds, packages=packages, whole=whole)


if __name__ == "__main__":
    main()
