"""One turn of one contender: start a run, kill a rank, see when the restarted gang has done its first step.

All are measured by the same two clocks' readings: just before SIGKILL, and rank 0's line in the run's `metrics.jsonl`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.contenders.ray_train import PIDS
from benchmarks.contenders.warm_fork import FORKED

from tidegate.arbiter.client import ArbiterClient
from tidegate.errors import TidegateError

ROOT = Path(__file__).parents[2]
RANKS = 4
DEADLINE_S = 180.0
LOG = "contender.log"
STEPS_AFTER_COMMIT = 3
"""A rank dies this many steps after its generation's first checkpoint, so a restart always has one to read."""


class TurnError(TidegateError):
    """A contender did not get where it should; the text ends with its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The same for every contender."""

    config: Path
    data: Path


def ours(inputs: Inputs, run_dir: Path, victim: int, environment: Mapping[str, str]) -> float:
    """By the job that users submit. Needs `ray.init` on the cluster where the arbiter runs."""
    command = ["jobs/train_dit.py", "--gpus", str(RANKS), "--min-gpus", str(RANKS)]
    with _running(command, inputs, run_dir, environment) as process:
        took_s = _kill_and_wait(process, run_dir, lambda generation: _pid_of_ours(generation, victim))
        # The run saves and gives its GPUs back: the next one's claim does not wait for a dead one's.
        process.send_signal(signal.SIGTERM)
        process.wait(DEADLINE_S)
    return took_s


def ray_train(inputs: Inputs, run_dir: Path, victim: int, environment: Mapping[str, str]) -> float:
    command = ["-m", "benchmarks.contenders.ray_train", "--ranks", str(RANKS)]
    with _running(command, inputs, run_dir, environment) as process:
        took_s = _kill_and_wait(
            process, run_dir, lambda generation: int((run_dir / PIDS / f"{generation}-{victim}").read_text())
        )
    workers = [int(path.read_text()) for path in (run_dir / PIDS).iterdir()]
    _wait(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), "the peer's workers end", run_dir)
    return took_s


def warm_fork(inputs: Inputs, run_dir: Path, generation: int, environment: Mapping[str, str]) -> float:
    """Seconds from forking all ranks to their first step, from the newest checkpoint in `run_dir`."""
    command = ["-m", "benchmarks.contenders.warm_fork", "--ranks", str(RANKS), "--generation", str(generation)]
    with _running(command, inputs, run_dir, environment) as process:
        stepped_at_s = _first_step_at_s(run_dir, generation - 1, process)
    return stepped_at_s - float((run_dir / FORKED).read_text())


def _kill_and_wait(process: subprocess.Popen[bytes], run_dir: Path, pid_of: Callable[[int], int]) -> float:
    _wait(lambda: _lines(run_dir / "checkpoints.jsonl"), "the first checkpoint", run_dir, process)
    saved = _lines(run_dir / "checkpoints.jsonl")[-1]
    step = saved["step"] + STEPS_AFTER_COMMIT
    _wait(lambda: _lines(run_dir / "metrics.jsonl")[-1]["step"] >= step, f"step {step}", run_dir, process)
    pid = pid_of(saved["generation"])
    killed_at_s = time.time()
    os.kill(pid, signal.SIGKILL)
    return _first_step_at_s(run_dir, saved["generation"], process) - killed_at_s


def _first_step_at_s(run_dir: Path, after_generation: int, process: subprocess.Popen[bytes]) -> float:
    def found() -> list[dict[str, Any]]:
        return [line for line in _lines(run_dir / "metrics.jsonl") if line["generation"] > after_generation]

    _wait(found, f"a step of a generation after {after_generation}", run_dir, process)
    at_s: float = found()[0]["at_s"]
    return at_s


def _pid_of_ours(generation: int, victim: int) -> int:
    status = asyncio.run(ArbiterClient().status())
    pids = [
        gang["pids"][victim]
        for gang in status["gangs"]
        if gang["phase"] == "running" and gang["gang_generation"] == generation
    ]
    if len(pids) != 1:
        raise TurnError(f"the arbiter knows {len(pids)} running gangs of generation {generation}, not one")
    pid: int = pids[0]
    return pid


@contextlib.contextmanager
def _running(
    command: Sequence[str], inputs: Inputs, run_dir: Path, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Leaving ends the process if it still runs."""
    run_dir.mkdir(parents=True, exist_ok=True)
    paths = ["--config", str(inputs.config), "--data", str(inputs.data), "--run-dir", str(run_dir)]
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


def _lines(path: Path) -> list[dict[str, Any]]:
    """Of a JSON lines file; a line that is being written is not there yet."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


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
