"""One contender's run, and the faults that strike it: how long until the restarted gang has done its first step.

All are measured by the same two clocks' readings: just before the fault, and rank 0's line in the run's
`metrics.jsonl`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import ray
from benchmarks.contenders.peer_rank import PIDS
from benchmarks.contenders.warm_fork import FORKED

from tidegate.arbiter.client import NAMESPACE, ArbiterClient
from tidegate.errors import TidegateError
from tidegate.gang.host import host_name
from tidegate.json_lines import read_lines
from tidegate.testing.local_cluster import LocalCluster, marked_processes

ROOT = Path(__file__).parents[2]
RANKS = 4
DEADLINE_S = 180.0
LOG = "contender.log"
STEPS_AFTER_COMMIT = 3
"""A fault strikes this many steps after its generation's first checkpoint, so a restart always has one to read."""
UNSHAKEN_S = 20.0
"""A gang that steps on for so long after a fault, in its old generation, was not stopped by it."""
NAME_LABEL = "tidegate/name"
RUN = "digits"
"""Our run's name: that of its config."""
TRAINS_MAX = 100
_CONTROLLER = re.compile(r"ray::TrainController\b")


class TurnError(TidegateError):
    """A contender did not get where it should; the text ends with its log."""


class NotBackError(TurnError):
    """No step was done again in time after a fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The same for every contender, but for the time after which a collective without its peers gives up."""

    config: Path
    peers_config: Path
    data: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A contender's run while it goes on."""

    run_dir: Path
    process: subprocess.Popen[bytes]
    cluster: LocalCluster | None
    where: Callable[[int, int], tuple[int, str]] = field(repr=False)
    """Process and node id of a generation's rank."""
    controller: Callable[[], int] = field(repr=False)
    """Process of Ray Train's controller."""

    def strike(self, fault: str, victim: int) -> float:
        """Let a fault strike after the present generation's next checkpoint; seconds until a step is done again.

        Raises:
            NotBackError: none is within `DEADLINE_S`, or the run has ended.
        """
        generation = self._ready()
        hit = {
            "rank_kill": lambda: os.kill(self.where(generation, victim)[0], signal.SIGKILL),
            "rank_hang": lambda: os.kill(self.where(generation, victim)[0], signal.SIGSTOP),
            "node_kill": lambda: self._kill_node(self.where(generation, victim)[1]),
            "controller_kill": lambda: os.kill(self.controller(), signal.SIGKILL),
        }[fault]
        struck_at_s = time.time()
        hit()
        return self._stepped_at_s(generation, struck_at_s) - struck_at_s

    def fails_without_controller(self) -> bool:
        """Kill Ray Train's controller; whether the run ends with an error."""
        self._ready()
        os.kill(self.controller(), signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(DEADLINE_S / 3) != 0
        return False

    def _ready(self) -> int:
        """The generation that is to be struck, once it may be."""

        def committed() -> bool:
            steps, commits = (
                list(read_lines(self.run_dir / "metrics.jsonl")),
                list(read_lines(self.run_dir / "checkpoints.jsonl")),
            )
            return bool(
                commits
                and commits[-1]["generation"] == steps[-1]["generation"]
                and steps[-1]["step"] >= commits[-1]["step"] + STEPS_AFTER_COMMIT
            )

        _wait(committed, "a checkpoint and some steps", self.run_dir, self.process)
        generation: int = list(read_lines(self.run_dir / "metrics.jsonl"))[-1]["generation"]
        return generation

    def _kill_node(self, node: str) -> None:
        assert self.cluster is not None
        self.cluster.kill_node(node_index(node))

    def _stepped_at_s(self, generation: int, struck_at_s: float) -> float:
        def found() -> float | None:
            lines = [line for line in read_lines(self.run_dir / "metrics.jsonl") if line["at_s"] > struck_at_s]
            newer = [line["at_s"] for line in lines if line["generation"] > generation]
            if newer:
                return float(newer[0])
            unshaken = lines and lines[-1]["at_s"] > struck_at_s + UNSHAKEN_S
            return float(lines[0]["at_s"]) if unshaken else None

        try:
            _wait(found, f"a step after generation {generation}", self.run_dir, self.process)
        except TurnError as error:
            raise NotBackError(str(error)) from None
        at_s = found()
        assert at_s is not None
        return at_s


@contextlib.contextmanager
def ours(inputs: Inputs, run_dir: Path, cluster: LocalCluster, *, ranks: int = RANKS) -> Iterator[Run]:
    """By the job that users submit. Needs `ray.init` on the cluster where the arbiter runs."""
    command = ["jobs/train_dit.py", "--gpus", str(ranks), "--min-gpus", str(ranks)]
    with _running(command, inputs.config, inputs.data, run_dir, cluster.client_environment()) as process:
        yield Run(run_dir=run_dir, process=process, cluster=cluster, where=_where_ours, controller=_host)
        # The run saves and gives its GPUs back: the next one's claim does not wait for a dead one's.
        process.send_signal(signal.SIGTERM)
        process.wait(DEADLINE_S)


@contextlib.contextmanager
def ray_train(
    inputs: Inputs, run_dir: Path, cluster: LocalCluster, settings: Mapping[str, str], *, ranks: int = RANKS
) -> Iterator[Run]:
    command = ["-m", "benchmarks.contenders.ray_train", "--ranks", str(ranks)]
    environment = {**cluster.client_environment(), **settings}
    with _running(command, inputs.peers_config, inputs.data, run_dir, environment) as process:
        yield Run(
            run_dir=run_dir,
            process=process,
            cluster=cluster,
            where=_noted(run_dir),
            controller=lambda: _train_controller(cluster),
        )
    _wait_for_end_of_ranks(run_dir)


@contextlib.contextmanager
def torchrun(
    inputs: Inputs, run_dir: Path, environment: Mapping[str, str], *, undisturbed: bool, ranks: int = RANKS
) -> Iterator[Run]:
    """`undisturbed`: with our config, as what all losses are compared with."""
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "--max-restarts=1000"]
    # It looks at its ranks as often as can be, and does not wait for the stopped one to end by itself.
    command += ["--monitor-interval=0.1", "--shutdown-timeout=1", "-m", "benchmarks.contenders.peer_rank"]
    config = inputs.config if undisturbed else inputs.peers_config
    with _running(command, config, inputs.data, run_dir, environment) as process:
        yield Run(run_dir=run_dir, process=process, cluster=None, where=_noted(run_dir), controller=_none)
    _wait_for_end_of_ranks(run_dir)


def warm_fork(inputs: Inputs, run_dir: Path, generation: int, environment: Mapping[str, str]) -> float:
    """Seconds from forking all ranks to their first step, from the newest checkpoint in `run_dir`."""
    command = ["-m", "benchmarks.contenders.warm_fork", "--ranks", str(RANKS), "--generation", str(generation)]
    with _running(command, inputs.config, inputs.data, run_dir, environment) as process:

        def stepped() -> list[dict[str, Any]]:
            return [line for line in read_lines(run_dir / "metrics.jsonl") if line["generation"] == generation]

        _wait(stepped, "the floor's first step", run_dir, process)
    return float(stepped()[0]["at_s"]) - float((run_dir / FORKED).read_text())


# --- what a run wrote down --------------------------------------------------------------------------------------


def losses(run_dir: Path) -> list[tuple[int, float]]:
    """Step and loss of every step that all ranks did, also of those done again."""
    lines = list(read_lines(run_dir / "metrics.jsonl"))
    return [(line["step"], line["loss"]) for line in lines if line["world_size"] == RANKS]


def steps_lost(run_dir: Path) -> list[int]:
    """Steps that each restart did again."""
    lines = list(read_lines(run_dir / "metrics.jsonl"))
    pairs = [(old, new) for old, new in itertools.pairwise(lines) if new["generation"] > old["generation"]]
    return [old["step"] - new["step"] + 1 for old, new in pairs]


def pace_s(run_dir: Path, first: int, last: int) -> float:
    """Seconds a step from the end of step `first` to that of step `last`, all that came between included.

    Raises:
        TurnError: the run began anew in between.
    """
    lines = [line for line in read_lines(run_dir / "metrics.jsonl") if first <= line["step"] <= last]
    if [line["step"] for line in lines] != list(range(first, last + 1)):
        raise TurnError(f"{run_dir}: steps {first} to {last} were not each done once")
    return float(lines[-1]["at_s"] - lines[0]["at_s"]) / (last - first)


def wait_for_step(run: Run, step: int) -> None:
    def done() -> bool:
        lines = list(read_lines(run.run_dir / "metrics.jsonl"))
        return bool(lines) and lines[-1]["step"] >= step

    _wait(done, f"step {step}", run.run_dir, run.process)


# --- nodes ------------------------------------------------------------------------------------------------------


def node_index(node: str) -> int:
    """A GPU node's place in its `LocalCluster`, by its id."""
    names = {row["NodeID"]: row["Labels"].get(NAME_LABEL, "") for row in ray.nodes()}
    return ord(names[node].removeprefix("node-")) - ord("a")


def revive(cluster: LocalCluster) -> None:
    """Start every GPU node that is dead."""
    alive = {row["Labels"].get(NAME_LABEL) for row in ray.nodes() if row["Alive"]}
    for index in range(len(cluster.gpus_per_node)):
        if f"node-{chr(ord('a') + index)}" not in alive:
            cluster.start_node(index)


# --- small pieces -----------------------------------------------------------------------------------------------


def _where_ours(generation: int, rank: int) -> tuple[int, str]:
    status = asyncio.run(ArbiterClient().status())
    gangs = [g for g in status["gangs"] if g["phase"] == "running" and g["gang_generation"] == generation]
    if len(gangs) != 1:
        raise TurnError(f"the arbiter knows {len(gangs)} running gangs of generation {generation}, not one")
    gpu, pid = gangs[0]["gpus"][rank], gangs[0]["pids"][rank]
    node = next(row["node"] for row in status["nodes"] if gpu in [seen["gpu"] for seen in row["gpus"]])
    return pid, node


def _host() -> int:
    """The process that leads Ray Train for our run: of those that stand by, the one that was started first."""
    for train in range(1, TRAINS_MAX):
        with contextlib.suppress(ValueError):  # it has ended, or was never there
            host = ray.get_actor(host_name(RUN, train), namespace=NAMESPACE)
            pid: int = ray.get(host.__ray_call__.remote(lambda _: os.getpid()))
            return pid
    raise TurnError(f"nobody leads Ray Train for {RUN}")


def _train_controller(cluster: LocalCluster) -> int:
    found = []
    for pid in marked_processes(cluster.marker):
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            if _CONTROLLER.match(" ".join(psutil.Process(pid).cmdline())):
                found.append(pid)
    if len(found) != 1:
        raise TurnError(f"{len(found)} processes look like Ray Train's controller, not one")
    return found[0]


def _none() -> int:
    raise TurnError("torchrun has no controller")


def _noted(run_dir: Path) -> Callable[[int, int], tuple[int, str]]:
    def where(generation: int, rank: int) -> tuple[int, str]:
        noted = json.loads((run_dir / PIDS / f"{generation}-{rank}").read_text(encoding="utf-8"))
        return noted["pid"], noted["node"]

    return where


def _wait_for_end_of_ranks(run_dir: Path) -> None:
    pids = [json.loads(path.read_text(encoding="utf-8"))["pid"] for path in (run_dir / PIDS).iterdir()]
    _wait(lambda: not any(psutil.pid_exists(pid) for pid in pids), "the peer's ranks end", run_dir)


@contextlib.contextmanager
def _running(
    command: Sequence[str], config: Path, data: Path, run_dir: Path, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Leaving ends the process if it still runs."""
    run_dir.mkdir(parents=True, exist_ok=True)
    paths = ["--config", str(config), "--data", str(data), "--run-dir", str(run_dir)]
    with (run_dir / LOG).open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, *command, *paths], cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(DEADLINE_S)


def _wait(
    condition: Callable[[], object], what: str, run_dir: Path, process: subprocess.Popen[bytes] | None = None
) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        ended = process is not None and process.poll() is not None
        if ended or time.monotonic() > deadline:
            log = (run_dir / LOG).read_text(errors="replace")
            why = "its process has ended" if ended else f"{DEADLINE_S:.0f} s are over"
            raise TurnError(f"waited in vain for {what}: {why}\n{log[-2000:]}")
        time.sleep(0.02)
