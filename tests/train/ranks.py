"""Real ranks with a real gloo, forked from a warm server so that a group of them starts in a blink."""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch

from tidegate.train.config import RunConfig
from tidegate.train.loop import run
from tidegate.train.progress import NullProgress

DEADLINE_S = 120.0


def group(size: int, target: Callable[..., None], *arguments: object) -> list[int | None]:
    """Run `target(rank, *arguments)` in `size` ranks that can find each other; their exit codes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = _server()
    ranks = [context.Process(target=_rank, args=(rank, size, port, target, arguments)) for rank in range(size)]
    for process in ranks:
        process.start()
    ends_s = time.monotonic() + DEADLINE_S
    for process in ranks:
        process.join(max(0.0, ends_s - time.monotonic()))
    late = [rank for rank, process in enumerate(ranks) if process.is_alive()]
    for rank in late:
        os.kill(ranks[rank].pid or 0, signal.SIGUSR1)  # it says where it stands
        ranks[rank].join(1.0)
        ranks[rank].kill()
    assert not late, f"ranks {late} of {size} still ran after {DEADLINE_S:g} s"
    return [process.exitcode for process in ranks]


def _server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tidegate.train.loop"])
    return context


def _rank(rank: int, size: int, port: int, target: Callable[..., None], arguments: tuple[object, ...]) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    faulthandler.register(signal.SIGUSR1, file=sys.__stderr__, all_threads=True, chain=True)
    torch.set_num_threads(1)
    target(rank, *arguments)


class Script(NullProgress):
    """What happens to a rank: it dies when a checkpoint was committed or a step done, or is told to stop."""

    def __init__(
        self, *, dies_at_commit: int | None = None, dies_at_step: int | None = None, stops_at: int | None = None
    ) -> None:
        self._dies_at_commit, self._dies_at_step, self._stops_at, self._step = dies_at_commit, dies_at_step, stops_at, 0

    def stepped(self, step: int, loss: float) -> None:
        self._step = step
        if step == self._dies_at_step:
            os._exit(9)

    def committed(self, step: int) -> None:
        if step == self._dies_at_commit:
            os._exit(9)

    def stop_requested(self) -> bool:
        # Asked inside a step, before it is counted.
        return self._stops_at is not None and self._step + 1 >= self._stops_at


def train(
    rank: int,
    config: RunConfig,
    data: Path,
    run_dir: Path,
    generation: int,
    scripts: dict[int, dict[str, int]],
) -> None:
    """One rank of one generation; `scripts` says what happens to which rank."""
    run(config, data, run_dir, Script(**scripts.get(rank, {})), generation=generation)


def lines(run_dir: Path, name: str) -> list[dict[str, Any]]:
    path = run_dir / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def losses(run_dir: Path, what: str = "loss") -> dict[int, float]:
    """Loss, or another number, by step; where a step was done twice, the last."""
    return {line["step"]: line[what] for line in lines(run_dir, "metrics.jsonl")}
