"""One rank: a process forked from a warm forkserver, which has torch and the loop imported already."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Mapping, MutableSequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from tidegate.gang import beat
from tidegate.gang.beat import SharedProgress
from tidegate.gang.plan import Plan, Slot
from tidegate.gang.stacks import answer_with_stack
from tidegate.processes import end_with_parent
from tidegate.train.config import RunConfig

PRELOAD = ("tidegate.gang.rank", "tidegate.gang.warm")
"""What the forkserver imports once. It never touches CUDA, so forking from it is safe."""

STORE_DEADLINE_S = 10.0
STORE_PERIOD_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJob:
    """What a rank is told; it crosses a process border."""

    config: RunConfig
    data_dir: str
    run_dir: str
    plan: Plan
    slot: Slot
    environment: Mapping[str, str] | None = None
    """Its agent's, where the forkserver is not the agent's own; None = as forked."""
    stacks_path: str = ""
    """Where its faulthandler writes when it is asked for its stack."""
    secret: str = ""
    """With which it asks other nodes' agents for copies of checkpoints in memory."""


def end_with_agent() -> None:
    """Have this process killed when its forkserver or its agent ends: an orphan would hold its GPU.

    The forkserver's end alone is not enough. One of the agent's own lives on while any rank lives, since each rank
    inherits the pipe by which it sees the agent's end, and a node's warm one serves agent after agent.

    Raises:
        OSError: the kernel refuses.
    """
    end_with_parent()
    agent = multiprocessing.parent_process()
    assert agent is not None

    def watch() -> None:
        agent.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="end-with-agent", daemon=True).start()


def leave_on_sigterm(cells: MutableSequence[float]) -> None:
    """A SIGTERM to one rank makes all save and leave at the same step: one that left alone would strand its peers in
    the next collective (C041)."""

    def asked(_signal: int, _frame: FrameType | None) -> None:
        beat.ask_to_stop(cells)

    signal.signal(signal.SIGTERM, asked)


def await_store(address: str, port: int, deadline_s: float) -> None:
    """Return once rank 0's store listens, or after `deadline_s`: torch then says what is wrong.

    torch itself looks again only after 0.25 to 0.6 s, and nodes start their ranks some 0.1 s apart.
    """
    ends_s = time.monotonic() + deadline_s
    while time.monotonic() < ends_s:
        try:
            socket.create_connection((address, port), timeout=1.0).close()
            return
        except OSError:
            time.sleep(STORE_PERIOD_S)


def rank_main(job: RankJob, cells: MutableSequence[float]) -> None:
    """Set up the environment that torchrun would give, then run the loop."""
    end_with_agent()
    leave_on_sigterm(cells)
    if job.stacks_path:
        answer_with_stack(job.stacks_path)
    if job.environment is not None:
        os.environ.clear()
        os.environ.update(job.environment)
    local_world = sum(1 for slot in job.plan.slots if slot.node == job.slot.node)
    os.environ.update(
        RANK=str(job.slot.rank),
        LOCAL_RANK=str(job.slot.local_rank),
        WORLD_SIZE=str(job.plan.world_size),
        LOCAL_WORLD_SIZE=str(local_world),
        MASTER_ADDR=job.plan.master_address,
        MASTER_PORT=str(job.plan.master_port),
        # By UUID: NVML and CUDA number GPUs differently.
        CUDA_VISIBLE_DEVICES=job.slot.gpu,
        CUDA_DEVICE_ORDER="PCI_BUS_ID",
        TIDEGATE_NODE=job.slot.node,
        TIDEGATE_SHELVES=" ".join(
            f"{shelf.address}:{shelf.port}" for shelf in job.plan.shelves if shelf.node != job.slot.node
        ),
        TIDEGATE_SHELF_SECRET=job.secret,
    )
    if job.slot.rank > 0:  # rank 0 makes it
        await_store(job.plan.master_address, job.plan.master_port, STORE_DEADLINE_S)
    from tidegate.train.loop import run

    run(
        job.config,
        job.data_dir,
        Path(job.run_dir),
        SharedProgress(cells),
        generation=job.plan.generation,
    )
