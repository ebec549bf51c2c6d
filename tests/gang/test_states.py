"""A gang's life, event by event."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tidegate.arbiter.messages import GangPhase
from tidegate.gang.states import (
    NEXT,
    Beaten,
    Evicted,
    Gang,
    Joined,
    Member,
    Note,
    RankBeat,
    Status,
    StopAsked,
    TrainEnded,
    advance,
    phase_of,
)
from tidegate.ids import ClaimId, Generation, GpuId, NodeId
from tidegate.spec.policy import GangSpec

SPEC = GangSpec(hang_floor_s=5.0, start_deadline_s=60.0, no_progress_generations=3)
NODES = (NodeId("a"), NodeId("b"))


class Life:
    """A gang, the notes it made, and the agents' part."""

    def __init__(self, min_ranks: int = 2, max_ranks: int = 8) -> None:
        self.gang = Gang(claim=ClaimId("run"), nodes=NODES, min_ranks=min_ranks, max_ranks=max_ranks)
        self.notes: list[Note] = []
        self.now_s = 1000.0
        self.attempt = 0

    def happen(self, event: object) -> None:
        before = self.gang.status
        self.gang, notes = advance(self.gang, event, SPEC, self.now_s)  # type: ignore[arg-type]
        self.notes += notes
        assert self.gang.status is before or self.gang.status in NEXT[before]

    def join(self) -> None:
        self.attempt += 1
        for node in NODES:
            gpus = (GpuId(f"{node}0"), GpuId(f"{node}1"))
            agent = f"{node}.{self.attempt}"
            self.happen(Joined(member=Member(node=node, agent=agent, address=f"host-{node}", port=7000, gpus=gpus)))

    def beat(self, step: int = -1, first: int | None = None, committed: int = -1, **of_rank: object) -> None:
        """All ranks report `step`; `of_rank` maps `r3=dict(...)` to what differs for rank 3."""
        plan = self.gang.plan
        assert plan is not None
        self.now_s += 0.2
        for node in NODES:
            ranks = tuple(
                replace(
                    RankBeat(
                        rank=slot.rank,
                        pid=100 + slot.rank,
                        exit_code=None,
                        step=step,
                        first_step=first if first is not None else step,
                        first_step_at_s=self.now_s,
                        phase="stepping",
                        idle_s=0.0,
                        progress_at_s=self.now_s,
                        loss=0.5,
                        committed_step=committed,
                    ),
                    **of_rank.get(f"r{slot.rank}", {}),  # type: ignore[arg-type]
                )
                for slot in plan.slots
                if slot.node == node
            )
            generation = plan.generation
            agent = f"{node}.{self.attempt}"
            self.happen(Beaten(node=node, agent=agent, generation=generation, port=7001, ranks=ranks))

    def kinds(self) -> list[str]:
        return [note.kind for note in self.notes]

    def last(self, kind: str) -> Note:
        return [note for note in self.notes if note.kind == kind][-1]


@pytest.fixture
def running() -> Life:
    life = Life()
    life.join()
    life.beat(1)
    life.beat(8, first=1, committed=5)
    assert life.gang.status is Status.RUNNING
    return life


def test_it_waits_for_every_node() -> None:
    life = Life()
    life.happen(Joined(member=Member(node=NODES[0], agent="a.1", address="h", port=1, gpus=(GpuId("a0"),))))
    assert life.gang.status is Status.GATHERING
    assert phase_of(life.gang) is GangPhase.FORMING


def test_one_rank_a_gpu_in_the_order_of_the_nodes(running: Life) -> None:
    plan = running.gang.plan
    assert plan is not None
    assert [(s.rank, s.local_rank, s.node, s.gpu) for s in plan.slots] == [
        (0, 0, "a", "a0"),
        (1, 1, "a", "a1"),
        (2, 0, "b", "b0"),
        (3, 1, "b", "b1"),
    ]
    assert (plan.master_address, plan.generation) == ("host-a", 1)


def test_no_more_ranks_than_asked_for() -> None:
    life = Life(max_ranks=3)
    life.join()
    assert life.gang.plan is not None
    assert life.gang.plan.world_size == 3


def test_a_dead_rank_means_a_new_generation_on_the_same_gpus(running: Life) -> None:
    before = running.gang.plan
    running.beat(8, first=1, committed=5, r2={"exit_code": -9})
    after = running.gang.plan
    assert before is not None
    assert after is not None
    assert after.generation == 2
    assert [slot.gpu for slot in after.slots] == [slot.gpu for slot in before.slots]
    assert "rank 2 on b0 was killed by signal 9" in running.last("planned").reason
    assert phase_of(running.gang) is GangPhase.RESTARTING


def test_steps_lost_and_time_to_the_next_step_are_written_down(running: Life) -> None:
    running.beat(8, first=1, committed=5, r2={"exit_code": -9})
    fault_at_s = running.now_s
    running.now_s = fault_at_s + 1.3
    running.beat(7, first=6, r0={"first_step_at_s": fault_at_s + 1.5, "step": 7})
    data = running.last("first_step").data
    assert data["step"] == 6
    assert data["steps_lost"] == 3  # 6, 7 and 8 are done again
    assert data["to_next_step_s"] == pytest.approx(1.5, abs=0.01)
    assert phase_of(running.gang) is GangPhase.RECOMPUTING
    running.beat(9, first=6)
    assert phase_of(running.gang) is GangPhase.RUNNING


def test_a_hot_gpu_leaves_and_the_others_go_on(running: Life) -> None:
    running.happen(Evicted(node=NODES[1], gpu=GpuId("b0"), reason="79 °C"))
    plan = running.gang.plan
    assert plan is not None
    assert [slot.gpu for slot in plan.slots] == ["a0", "a1", "b1"]
    assert [slot.local_rank for slot in plan.slots] == [0, 1, 0]
    again = running.gang
    running.happen(Evicted(node=NODES[1], gpu=GpuId("b0"), reason="79 °C"))
    assert running.gang is again


def test_a_node_leaves_whole(running: Life) -> None:
    running.happen(Evicted(node=NODES[0], gpu=None, reason="XID 79"))
    assert running.gang.plan is not None
    assert [slot.gpu for slot in running.gang.plan.slots] == ["b0", "b1"]
    assert running.gang.plan.master_address == "host-b"


def test_too_few_gpus_end_the_run_with_the_reason(running: Life) -> None:
    running.happen(Evicted(node=NODES[0], gpu=None, reason="XID 79"))
    running.happen(Evicted(node=NODES[1], gpu=GpuId("b1"), reason="80 °C"))
    assert running.gang.status is Status.FAILED
    assert "1 GPUs are left, at least 2 are needed; 80 °C" in running.gang.reason


@pytest.mark.parametrize(("agent", "generation"), [("a.1", 1), ("a.0", 2), ("somebody", 2)])
def test_beats_of_an_older_generation_or_agent_change_nothing(running: Life, agent: str, generation: int) -> None:
    running.beat(8, first=1, committed=5, r2={"exit_code": -9})
    now = running.gang
    assert now.plan is not None
    assert now.plan.generation == 2
    dead = RankBeat(
        rank=0,
        pid=100,
        exit_code=-9,
        step=8,
        first_step=1,
        first_step_at_s=0.0,
        phase="stepping",
        idle_s=0.0,
        progress_at_s=0.0,
        loss=None,
        committed_step=99,
    )
    running.happen(Beaten(node=NODES[0], agent=agent, generation=Generation(generation), port=7001, ranks=(dead,)))
    assert running.gang == now


def test_a_rank_that_stands_still_is_a_hang(running: Life) -> None:
    running.beat(8, first=1, committed=5, r1={"idle_s": 4.9})
    assert running.gang.status is Status.RUNNING
    running.beat(8, first=1, committed=5, r1={"idle_s": 60.0, "phase": "saving"})
    assert running.gang.status is Status.RUNNING
    running.beat(8, first=1, committed=5, r1={"idle_s": 5.1})
    assert "rank 1 has stood still for 5.1 s in stepping" in running.last("planned").reason


def test_slow_steps_are_no_hang() -> None:
    """The limit follows the step time: 5 × 4 s."""
    life = Life()
    life.join()
    for step in range(1, 12):
        life.now_s += 3.8
        life.beat(step, first=1)
    assert life.gang.step_s == pytest.approx(4.0, abs=0.3)
    life.beat(11, first=1, r1={"idle_s": 18.0})
    assert life.gang.status is Status.RUNNING
    life.beat(11, first=1, r1={"idle_s": 22.0})
    assert life.gang.status is Status.LAUNCHING


def test_no_first_step_in_time_is_a_fault() -> None:
    life = Life()
    life.join()
    life.now_s += 61
    life.beat()
    assert life.gang.plan is not None
    assert life.gang.plan.generation == 2
    assert "no first step within 60 s" in life.last("planned").reason


def test_three_barren_generations_stop_the_run(running: Life) -> None:
    """Endless restarts help nobody (C043): the same end without a checkpoint in between is a verdict."""
    running.beat(8, first=1, committed=5, r2={"exit_code": 1})
    for _ in range(2):
        running.beat(7, first=6, committed=5)
        running.beat(7, first=6, committed=5, r2={"exit_code": 1})
    assert running.gang.status is Status.LAUNCHING
    running.beat(7, first=6, committed=5, r2={"exit_code": 1})
    assert running.gang.status is Status.FAILED
    assert "3 generations in a row ended without a new checkpoint" in running.gang.reason
    assert "rank 2 on b0 ended with exit code 1" in running.gang.reason


def test_a_commit_in_between_starts_the_count_anew(running: Life) -> None:
    committed = 5
    for _ in range(6):
        committed += 5
        running.beat(committed + 1, first=committed - 4, committed=committed)
        running.beat(committed + 1, first=committed - 4, committed=committed, r2={"exit_code": 1})
    assert running.gang.status is Status.LAUNCHING


def test_all_ranks_done_is_the_end(running: Life) -> None:
    done = {"exit_code": 0, "phase": "done"}
    running.beat(10, first=1, r0=done, r1=done, r2=done)
    assert running.gang.status is Status.RUNNING
    assert phase_of(running.gang) is GangPhase.FINISHING
    running.beat(10, first=1, r0=done, r1=done, r2=done, r3=done)
    assert running.gang.status is Status.FINISHED
    assert running.gang.reason == "all 10 steps are done"


def test_a_stop_is_told_and_named_at_the_end(running: Life) -> None:
    running.happen(StopAsked(reason="the job was stopped"))
    assert running.gang.stop_reason == "the job was stopped"
    done = {"exit_code": 0, "phase": "done"}
    running.beat(10, first=1, r0=done, r1=done, r2=done, r3=done)
    assert (running.gang.status, running.gang.reason) == (Status.FINISHED, "the job was stopped")


def test_a_stop_before_anything_runs_ends_at_once() -> None:
    life = Life()
    life.happen(StopAsked(reason="the job was stopped"))
    assert life.gang.status is Status.FINISHED


def test_ray_train_restarts_its_group(running: Life) -> None:
    """A node's worker died: all agents come anew, the run goes on from its checkpoint with the next generation."""
    running.join()
    assert running.gang.plan is not None
    assert running.gang.plan.generation == 2
    assert "group_restarted" in running.kinds()
    running.beat(6, first=6, committed=5)
    assert running.last("first_step").data["steps_lost"] == 3


def test_ray_train_gives_up(running: Life) -> None:
    running.happen(TrainEnded(error="Ray Train: ControllerError"))
    assert running.gang.status is Status.FAILED
    running.join()
    assert running.gang.status is Status.FAILED
