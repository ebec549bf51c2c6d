"""Field cases that need real ranks or a real agent, but no cluster. Those of the state machine: `test_states.py`."""

from __future__ import annotations

import multiprocessing
import os
import signal
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from captioned import captioned_images, tiny_run
from tidegate.checkpoint.restore import newest_good
from tidegate.data.prepare import prepare
from tidegate.gang import beat
from tidegate.gang.agent import AgentJob, NodeAgent
from tidegate.gang.order import clocks_problem
from tidegate.gang.plan import Plan, Slot
from tidegate.gang.rank import PRELOAD, RankJob, rank_main
from tidegate.ids import Generation, GpuId, NodeId
from tidegate.json_lines import read_lines
from tidegate.ports import free_port
from tidegate.spec.policy import GangSpec
from waiting import wait_until

NODE = NodeId("here")
RANKS = 4


class Ranks:
    """One generation of real ranks, as an agent starts them."""

    def __init__(self, folder: Path) -> None:
        prepare(captioned_images(folder / "images", 20), folder / "shards", seed=0, rows_per_shard=10)
        self.run_dir = folder / "run"
        context: ForkServerContext = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOAD))
        slots = tuple(Slot(rank=rank, local_rank=rank, node=NODE, gpu=GpuId(str(rank))) for rank in range(RANKS))
        plan = Plan(generation=Generation(1), master_address="127.0.0.1", master_port=free_port(), slots=slots)
        config = tiny_run(steps=100_000, checkpoint={"every_steps": 1000, "keep": 2}, timeout_s=60.0)
        self.cells = [context.RawArray("d", beat.FIELDS) for _ in slots]
        self.processes = []
        for slot, cells in zip(slots, self.cells, strict=True):
            beat.clear(cells)
            job = RankJob(
                config=config,
                data_dir=str(folder / "shards"),
                run_dir=str(self.run_dir),
                plan=plan,
                slot=slot,
                environment={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            process = context.Process(target=rank_main, args=(job, cells))
            process.start()
            self.processes.append(process)

    def steps(self) -> list[int]:
        pids = [process.pid or 0 for process in self.processes]
        return [beat.read(cells, rank, pids[rank], None).step for rank, cells in enumerate(self.cells)]

    def end(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()


def test_c041_sigterm_to_one_rank_and_all_leave_at_the_same_step(tmp_path: Path) -> None:
    """C041: if one rank leaves alone the others block in the next collective. Here the one that is told asks, all save
    the same step and end well."""
    ranks = Ranks(tmp_path)
    try:
        wait_until(lambda: min(ranks.steps()) >= 5, 60, "all ranks make steps")
        told = ranks.processes[2]
        assert told.pid is not None
        os.kill(told.pid, signal.SIGTERM)
        wait_until(lambda: not any(process.is_alive() for process in ranks.processes), 20, "all ranks leave")
        assert [process.exitcode for process in ranks.processes] == [0] * RANKS
        last = {line["step"] for line in read_lines(ranks.run_dir / "metrics.jsonl")}
        found = newest_good(ranks.run_dir / "checkpoints").checkpoint
        assert found is not None
        assert set(ranks.steps()) == {found.manifest.step} == {max(last)}
    finally:
        ranks.end()


@dataclass(slots=True)
class HalfHeard(NodeAgent):
    """An agent whose coordinator answers by a script."""

    answers: list[bool | None] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def _ask(self, method: str, argument: object) -> Any:
        self.asked.append(method)
        return self.answers.pop(0)


@pytest.mark.parametrize("unconfirmed", [False, None])
def test_c042_an_agent_starts_nothing_before_it_is_known_to_be_watched(unconfirmed: bool | None) -> None:
    """C042: a start of the watching whose answer is False, or never comes, and is not read, leaves a run unwatched."""
    job = AgentJob(
        coordinator="gang-x", config=tiny_run(), data_dir="", run_dir="", heartbeat_s=0.01, silent_after_s=60.0
    )
    agent = HalfHeard(job=job, node=NODE, address="127.0.0.1", answers=[unconfirmed, unconfirmed, True])
    agent._join({})
    assert agent.asked == ["join"] * 3
    assert agent.answers == []


@pytest.mark.parametrize(
    ("collective_s", "watchdog_s", "refused"), [(600, 120, True), (600, 600, True), (600, 660, False)]
)
def test_c045_a_watchdog_is_longer_than_the_collective_that_it_watches(
    collective_s: float, watchdog_s: float, refused: bool
) -> None:
    """C045: a shorter one kills jobs that would have finished, an equal one hides the cause. Values as reported."""
    spec = GangSpec(start_deadline_s=watchdog_s)
    problem = clocks_problem(spec, tiny_run(timeout_s=collective_s))
    assert (problem is not None) == refused
    if problem is not None:
        assert "start_deadline_s" in problem
        assert f"timeout_s {collective_s:g}" in problem


def test_c045_the_policys_own_clocks_are_in_order() -> None:
    with pytest.raises(ValidationError, match="start_deadline_s must be longer than hang_floor_s"):
        GangSpec(hang_floor_s=60.0, start_deadline_s=60.0)
    GangSpec()
