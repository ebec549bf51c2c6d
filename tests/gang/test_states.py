"""A gang's life, event by event."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tidegate.arbiter.messages import GangPhase, Grant, GrantedNode
from tidegate.gang.events import (
    Beaten,
    Evicted,
    Formed,
    Joined,
    LeaveAsked,
    Reattached,
    Regranted,
    StopAsked,
    Ticked,
    TrainEnded,
    TrainLost,
    Ungranted,
)
from tidegate.gang.plan import Member, RankBeat, Reply
from tidegate.gang.shape import NEXT, Gang, Note, Status, phase_of, reply_to
from tidegate.gang.states import MOST_REGROUPS, advance
from tidegate.ids import ClaimId, Generation, GpuId, NodeId
from tidegate.spec.policy import GangSpec

SPEC = GangSpec(hang_floor_s=5.0, start_deadline_s=60.0, no_progress_generations=3, join_deadline_s=30.0)
NODES = (NodeId("a"), NodeId("b"))
STEPS = 10


def grant(generation: int = 1, group: str = "group-1", **gpus: int) -> Grant:
    """`grant(a=2, b=1)`: two GPUs on node a, one on b."""
    return Grant(
        claim=ClaimId("run"),
        generation=Generation(generation),
        placement_group=group,
        gpus_per_node=2,
        nodes=tuple(
            GrantedNode(
                node=NodeId(node), address=f"host-{node}", gpus=tuple(GpuId(f"{node}{i}") for i in range(count))
            )
            for node, count in (gpus or {"a": 2, "b": 2}).items()
        ),
    )


def rank_beat(rank: int) -> RankBeat:
    return RankBeat(
        rank=rank,
        pid=100 + rank,
        exit_code=None,
        step=8,
        first_step=1,
        first_step_at_s=0.0,
        phase="stepping",
        idle_s=0.0,
        progress_at_s=0.0,
        loss=None,
        committed_step=5,
    )


class Life:
    """A gang, the notes it made, and the agents' part."""

    def __init__(self, min_ranks: int = 2, max_ranks: int = 8) -> None:
        self.gang = Gang(grant=grant(), min_ranks=min_ranks, max_ranks=max_ranks, steps=STEPS)
        self.notes: list[Note] = []
        self.now_s = 1000.0
        self.attempt = 0

    def happen(self, event: object) -> None:
        before = self.gang.status
        self.gang, notes = advance(self.gang, event, SPEC, self.now_s)  # type: ignore[arg-type]
        self.notes += notes
        assert self.gang.status is before or self.gang.status in NEXT[before]

    def join(self) -> None:
        """Ray Train starts its workers, and all of them join."""
        self.happen(Formed())
        self.attempt += 1
        for node in self.gang.nodes:
            self.join_one(node)

    def join_one(self, node: NodeId) -> None:
        member = Member(node=node, agent=f"{node}.{self.attempt}", address=f"host-{node}", port=7000)
        self.happen(Joined(member=member))

    def beat(
        self,
        step: int = -1,
        first: int | None = None,
        committed: int = -1,
        silent: tuple[NodeId, ...] = (),
        **of_rank: object,
    ) -> None:
        """All ranks report `step`; `of_rank` maps `r3=dict(...)` to what differs for rank 3."""
        plan = self.gang.plan
        assert plan is not None
        self.now_s += 0.2
        for node in self.gang.nodes:
            if node in silent:
                continue
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
                    **of_rank.get(f"r{slot.rank}", of_rank.get("all_ranks", {})),  # type: ignore[arg-type]
                )
                for slot in plan.slots
                if slot.node == node
            )
            self.happen(
                Beaten(
                    node=node,
                    agent=f"{node}.{self.attempt}",
                    generation=plan.generation,
                    port=7001,
                    ranks=ranks,
                )
            )

    def leave_saved(self, step: int) -> None:
        """All ranks save and end well."""
        told = {"exit_code": 0, "phase": "done", "stopping": True}
        self.beat(step, first=1, committed=step, all_ranks=told)

    def reply(self, node: NodeId = NODES[0]) -> Reply:
        return reply_to(self.gang, node, f"{node}.{self.attempt}")

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
    life.happen(Formed())
    life.join_one(NODES[0])
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


def test_of_those_that_ended_together_the_killed_one_is_the_cause(running: Life) -> None:
    """Its peers on the node lose their connection to it, and may have ended too by the time of the node's beat."""
    running.beat(8, first=1, committed=5, r2={"exit_code": 1}, r3={"exit_code": -9})
    assert "rank 3 on b1 was killed by signal 9" in running.last("planned").reason


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


def test_too_few_gpus_wait_for_others_and_end_with_the_reason(running: Life) -> None:
    running.happen(Evicted(node=NODES[0], gpu=None, reason="XID 79"))
    running.happen(Evicted(node=NODES[1], gpu=GpuId("b1"), reason="80 °C"))
    assert running.gang.status is Status.SHORT
    assert running.reply() == Reply(clear=True)
    running.now_s += SPEC.short_deadline_s + 1
    running.happen(Ticked())
    assert running.gang.status is Status.FAILED
    assert "1 GPUs are left, at least 2 are needed; 80 °C" in running.gang.reason


def test_a_short_gang_goes_on_when_a_gpu_has_cooled(running: Life) -> None:
    running.happen(Evicted(node=NODES[0], gpu=None, reason="XID 79"))
    running.happen(Evicted(node=NODES[1], gpu=GpuId("b1"), reason="80 °C"))
    running.happen(Regranted(grant=grant(2, a=0, b=2)))
    assert running.gang.status is Status.LAUNCHING
    assert running.gang.plan is not None
    assert [slot.gpu for slot in running.gang.plan.slots] == ["b0", "b1"]


@pytest.mark.parametrize(("agent", "generation"), [("a.1", 1), ("a.0", 2), ("somebody", 2)])
def test_beats_of_an_older_generation_or_agent_change_nothing(running: Life, agent: str, generation: int) -> None:
    running.beat(8, first=1, committed=5, r2={"exit_code": -9})
    now = running.gang
    assert now.plan is not None
    assert now.plan.generation == 2
    dead = replace(rank_beat(0), exit_code=-9, committed_step=99)
    running.happen(Beaten(node=NODES[0], agent=agent, generation=Generation(generation), port=7001, ranks=(dead,)))
    assert running.gang == now


def test_a_killed_rank_that_is_heard_of_after_its_peers_is_written_down(running: Life) -> None:
    first = running.gang.plan
    running.beat(8, first=1, committed=5, silent=(NODES[0],), r2={"exit_code": 1})
    assert running.gang.generation == 2
    assert first is not None
    dead = replace(rank_beat(1), exit_code=-9)
    running.happen(
        Beaten(node=NODES[0], agent="a.1", generation=first.generation, port=7001, ranks=(dead,)),
    )
    assert "rank 1 on node a was killed by signal 9" in running.last("rank_died").reason
    assert running.gang.generation == 2


def test_a_rank_that_stands_still_is_a_hang(running: Life) -> None:
    running.beat(8, first=1, committed=5, r1={"idle_s": 4.9})
    assert running.gang.status is Status.RUNNING
    running.beat(8, first=1, committed=5, r1={"idle_s": 599.0, "phase": "saving"})
    assert running.gang.status is Status.RUNNING
    running.beat(8, first=1, committed=5, r1={"idle_s": 5.1})
    assert "rank 1 has stood still for 5.1 s in stepping" in running.last("planned").reason


def test_slow_steps_are_no_hang() -> None:
    """The limit follows the step time: 5 × 4 s. The median, so one slow step does not stretch it."""
    life = Life()
    life.join()
    for step in range(1, 9):
        life.now_s += 60.0 if step == 5 else 3.8
        life.beat(step, first=1)
    life.beat(8, first=1, r1={"idle_s": 18.0})
    assert life.gang.status is Status.RUNNING
    life.beat(8, first=1, r1={"idle_s": 22.0})
    assert life.gang.status is Status.LAUNCHING


def test_a_hang_names_who_is_behind_before_the_kill(running: Life) -> None:
    running.beat(8, first=1, committed=5, r2={"step": 7})
    running.beat(8, first=1, committed=5, r0={"idle_s": 5.1}, r2={"step": 7, "idle_s": 5.2})
    data = running.last("hung").data
    assert data["suspects"] == [{"rank": 2, "gpu": "b0", "node": "b"}]
    assert data["ranks"]["1"] == {"phase": "stepping", "step": 8, "idle_s": 0.0, "process_state": ""}  # type: ignore[index]


def test_the_stacks_of_a_hung_generation_are_asked_for_before_the_next_takes_its_place(running: Life) -> None:
    assert running.reply().stacks_of is None
    running.beat(8, first=1, committed=5, r1={"idle_s": 5.1})
    reply = running.reply()
    assert reply.plan is not None
    assert (reply.stacks_of, reply.plan.generation) == (1, 2)
    running.beat(6, first=6, committed=5)
    running.beat(8, first=6, committed=5)
    running.beat(8, first=6, committed=5, r1={"idle_s": 5.1})
    assert running.gang.status is Status.FAILED, "hung twice in the same place"
    assert (running.reply().over, running.reply().stacks_of) == (True, 2)


def test_a_process_that_the_kernel_holds_is_suspected_first(running: Life) -> None:
    running.beat(8, first=1, committed=5, r0={"process_state": "S", "step": 7}, r3={"process_state": "T"})
    running.beat(8, first=1, committed=5, r0={"process_state": "S", "step": 7, "idle_s": 5.1})
    assert [suspect["rank"] for suspect in running.last("hung").data["suspects"]] == [3]  # type: ignore[attr-defined]


def test_progress_counts_not_liveness(running: Life) -> None:
    """C046: a loader that stalls on shared storage; all processes are up, they beat, and no step is done."""
    for _ in range(200):
        running.beat(8, first=1, committed=5, all_ranks={"idle_s": running.now_s - 1000.4})
        if running.gang.status is Status.LAUNCHING:
            break
    assert running.gang.status is Status.LAUNCHING
    assert running.now_s - 1000.4 < 6.0


def test_the_same_hang_twice_stops_the_run(running: Life) -> None:
    """C043: a deterministic hang returns after a restart."""
    running.beat(8, first=1, committed=5, r1={"idle_s": 5.1})
    assert running.gang.status is Status.LAUNCHING
    running.beat(6, first=6, committed=5)
    running.beat(8, first=6, committed=5)
    running.beat(8, first=6, committed=5, r1={"idle_s": 5.1, "process_state": "D"})
    assert running.gang.status is Status.FAILED
    assert "hung twice in the same place, at step 8 in stepping" in running.gang.reason
    assert "rank 1 on a1" in running.gang.reason


def test_a_hang_elsewhere_is_another_one(running: Life) -> None:
    running.beat(8, first=1, committed=5, r1={"idle_s": 5.1})
    running.beat(6, first=6, committed=5)
    running.beat(7, first=6, committed=5, r1={"idle_s": 5.1})
    assert running.gang.status is Status.LAUNCHING


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
    assert "suspect nodes: a, b" in running.gang.reason


def test_a_commit_in_between_starts_the_count_anew(running: Life) -> None:
    for committed in (6, 7, 8, 9):
        running.beat(committed, first=committed, committed=committed)
        running.beat(committed, first=committed, committed=committed, r2={"exit_code": 1})
    assert running.gang.status is Status.LAUNCHING


def test_all_ranks_done_is_the_end(running: Life) -> None:
    done = {"exit_code": 0, "phase": "done"}
    running.beat(10, first=1, r0=done, r1=done, r2=done)
    assert running.gang.status is Status.RUNNING
    assert phase_of(running.gang) is GangPhase.FINISHING
    running.beat(10, first=1, r0=done, r1=done, r2=done, r3=done)
    assert running.gang.status is Status.FINISHED
    assert running.gang.reason == "all 10 steps are done"


def test_a_run_whose_steps_were_all_done_ends_without_doing_one() -> None:
    """Started again from the last step's checkpoint, its ranks go straight to the export."""
    life = Life()
    life.join()
    life.beat(-1, all_ranks={"exit_code": 0, "phase": "done"})
    assert (life.gang.status, life.gang.reason) == (Status.FINISHED, "all 10 steps are done")


def test_a_stop_is_told_and_named_at_the_end(running: Life) -> None:
    running.happen(StopAsked(reason="the job was stopped"))
    assert running.reply().stop
    running.leave_saved(9)
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


def test_the_ranks_of_a_killed_one_are_killed_at_once(running: Life) -> None:
    """C036: no peer waits for its collective's timeout: the next reply already is the next generation's plan."""
    running.beat(8, first=1, committed=5, silent=(NODES[1],), r1={"exit_code": -9})
    for node in NODES:
        plan = running.reply(node).plan
        assert plan is not None
        assert plan.generation == 2


def test_a_sigterm_to_one_rank_is_a_restart_from_a_fresh_save(running: Life) -> None:
    """C041: all ranks have left at the same step, which nobody here had asked for."""
    told = {"exit_code": 0, "phase": "done"}
    running.beat(9, first=1, committed=9, r2={**told, "stopping": True}, all_ranks=told)
    assert running.gang.status is Status.LAUNCHING
    assert "nobody here had asked for" in running.gang.reason
    assert running.gang.barren == ()


# --- preemption: leave, and come back ---------------------------------------------------------------------------


def test_told_to_leave_it_saves_and_leaves(running: Life) -> None:
    """C031: training yields at a committed checkpoint."""
    running.happen(LeaveAsked(reason="a stronger claim", by_s=running.now_s + 30))
    assert running.reply().stop
    assert phase_of(running.gang) is GangPhase.RUNNING
    running.leave_saved(9)
    assert (running.gang.status, running.gang.reason) == (Status.LEFT, "a stronger claim")
    assert phase_of(running.gang) is GangPhase.LEFT
    assert running.reply().over
    assert running.gang.committed_step == 9


def test_it_comes_back_with_its_next_grant_and_rising_generations(running: Life) -> None:
    running.happen(LeaveAsked(reason="a stronger claim"))
    running.leave_saved(9)
    running.happen(Regranted(grant=grant(1)))
    assert running.gang.status is Status.LEFT, "the grant that it left is none to come back on"
    running.happen(Regranted(grant=grant(7, "group-2", c=2)))
    assert running.gang.status is Status.GATHERING
    running.join()
    assert running.gang.plan is not None
    assert running.gang.plan.generation == 2
    assert [slot.node for slot in running.gang.plan.slots] == ["c", "c"]
    assert running.gang.leave is None
    running.beat(10, first=10, committed=9)
    assert running.last("first_step").data["steps_lost"] == 0


def test_a_leave_whose_save_takes_too_long_leaves_unsaved(running: Life) -> None:
    """C039: committed whole or not at all, and the nodes are free in time."""
    by_s = running.now_s + 10
    running.happen(LeaveAsked(reason="a stronger claim", by_s=by_s))
    running.beat(8, first=1, committed=5, all_ranks={"phase": "saving"})
    running.happen(Ticked())
    assert running.gang.status is Status.RUNNING
    running.now_s = by_s - SPEC.save_margin_s
    running.happen(Ticked())
    assert running.gang.status is Status.LEFT
    assert "not saved in time" in running.gang.reason
    assert running.gang.committed_step == 5


def test_a_rank_that_dies_while_leaving_is_not_started_again(running: Life) -> None:
    """C039: rank 3 dies after writing its part, before the commit."""
    running.happen(LeaveAsked(reason="a stronger claim"))
    running.beat(8, first=1, committed=5, r3={"exit_code": -9}, all_ranks={"phase": "saving"})
    assert running.gang.status is Status.LEFT
    assert "not saved, since rank 3 on b1 was killed by signal 9" in running.gang.reason


@pytest.mark.parametrize("when", ["gathering", "launching"])
def test_without_a_step_there_is_nothing_to_save(when: str) -> None:
    life = Life()
    if when == "launching":
        life.join()
    life.happen(LeaveAsked(reason="a stronger claim"))
    assert life.gang.status is Status.LEFT


def test_all_steps_done_is_the_end_also_while_leaving(running: Life) -> None:
    running.happen(LeaveAsked(reason="a stronger claim"))
    running.leave_saved(STEPS)
    assert running.gang.status is Status.FINISHED


# --- drain notice -----------------------------------------------------------------------------------------------


def test_a_drain_notice_saves_first_then_goes_on_without_the_node(running: Life) -> None:
    """C038: the warning before a node is taken is used; nothing is done twice."""
    by_s = running.now_s + 30
    running.happen(Evicted(node=NODES[1], gpu=None, reason="the node drains", save_by_s=by_s))
    assert running.gang.status is Status.RUNNING
    assert running.reply().stop
    running.leave_saved(9)
    assert running.now_s < by_s
    plan = running.gang.plan
    assert plan is not None
    assert [slot.node for slot in plan.slots] == ["a", "a"]
    assert not running.reply().stop, "the next generation trains on"
    running.beat(10, first=10, committed=9)
    assert running.last("first_step").data["steps_lost"] == 0


def test_a_drain_that_cannot_save_in_time_goes_on_without_the_node_all_the_same(running: Life) -> None:
    """C038, C039: the save needs 40 s, 30 s are left."""
    by_s = running.now_s + 30
    running.happen(Evicted(node=NODES[1], gpu=None, reason="the node drains", save_by_s=by_s))
    while running.now_s < by_s - SPEC.save_margin_s:
        running.beat(8, first=1, committed=5, all_ranks={"phase": "saving"})
        running.happen(Ticked())
    assert running.now_s < by_s
    assert running.gang.status is Status.LAUNCHING
    assert "not saved in time" in running.gang.reason
    assert running.gang.plan is not None
    assert {slot.node for slot in running.gang.plan.slots} == {"a"}


def test_a_verdict_for_now_does_not_wait_for_a_drain(running: Life) -> None:
    running.happen(Evicted(node=NODES[1], gpu=GpuId("b1"), reason="the node drains", save_by_s=running.now_s + 30))
    running.happen(Evicted(node=NODES[0], gpu=GpuId("a0"), reason="79 °C"))
    assert running.gang.plan is not None
    assert [slot.gpu for slot in running.gang.plan.slots] == ["a1", "b0"]
    assert running.gang.drain is None


# --- another grant ----------------------------------------------------------------------------------------------


def test_a_cooled_gpu_comes_in_with_the_next_checkpoint(running: Life) -> None:
    running.happen(Evicted(node=NODES[1], gpu=GpuId("b0"), reason="79 °C"))
    running.beat(6, first=6, committed=5)
    running.happen(Regranted(grant=grant(2)))
    running.beat(7, first=6, committed=5)
    assert running.gang.generation == 2, "nothing is done twice for it"
    running.beat(8, first=6, committed=8)
    assert running.gang.generation == 3
    assert running.gang.plan is not None
    assert running.gang.plan.world_size == 4
    running.beat(9, first=9, committed=8)
    assert running.last("first_step").data["steps_lost"] == 0


def test_a_bad_gpu_that_the_grant_lists_no_more_leaves_with_the_next_checkpoint(running: Life) -> None:
    running.happen(Regranted(grant=grant(2, a=2, b=1)))
    running.beat(9, first=1, committed=5)
    assert running.gang.generation == 1
    running.beat(9, first=1, committed=9)
    assert running.gang.plan is not None
    assert [slot.gpu for slot in running.gang.plan.slots] == ["a0", "a1", "b0"]


def test_a_grant_with_nothing_new_for_the_plan_restarts_nothing() -> None:
    life = Life(max_ranks=3)
    life.join()
    life.beat(1)
    life.happen(Evicted(node=NODES[0], gpu=GpuId("a1"), reason="79 °C"))
    life.beat(2, first=2, committed=1)
    life.happen(Regranted(grant=grant(2)))
    life.beat(3, first=2, committed=3)
    assert life.gang.generation == 2, "three ranks run and no more are wanted"


def test_a_group_that_is_taken_away_is_not_formed_on_again(running: Life) -> None:
    """The arbiter places the gang anew, or queues it: it holds no GPU until the next grant, however long that takes."""
    running.happen(Ungranted())
    assert (running.gang.status, running.gang.grant_stands) == (Status.GATHERING, False)
    running.now_s += 10_000.0
    running.happen(Ticked())
    assert (running.gang.status, running.gang.train) == (Status.GATHERING, 1)
    running.happen(Regranted(grant=grant(2, "group-2")))
    assert running.gang.grant_stands
    running.join()
    assert running.gang.generation == 2


def test_a_grant_that_was_missed_in_one_answer_stands_in_the_next(running: Life) -> None:
    running.happen(Ungranted())
    running.happen(Regranted(grant=grant(1)))
    assert running.gang.grant_stands


def test_the_same_grant_again_changes_nothing(running: Life) -> None:
    now = running.gang
    running.happen(Regranted(grant=grant(1)))
    assert running.gang is now


def test_a_node_swap_is_a_grant_with_another_group(running: Life) -> None:
    running.happen(Regranted(grant=grant(2, "group-2", a=2, c=2)))
    assert running.gang.status is Status.GATHERING
    assert running.reply(NODES[0]).stale
    running.join()
    plan = running.gang.plan
    assert plan is not None
    assert plan.generation == 2
    assert [slot.gpu for slot in plan.slots] == ["a0", "a1", "c0", "c1"]


def test_nothing_is_planned_on_a_node_that_says_nothing(running: Life) -> None:
    """A frozen node: its peers' ranks end, and the gang waits for word instead of starting ranks with a dead peer."""
    for _ in range(20):
        running.beat(8, first=1, committed=5, silent=(NODES[1],))
    running.beat(8, first=1, committed=5, silent=(NODES[1],), r0={"exit_code": 1})
    assert running.gang.status is Status.GATHERING
    assert running.reply() == Reply(clear=True)
    running.beat(8, first=1, committed=5)
    assert running.gang.status is Status.LAUNCHING
    assert running.gang.generation == 2


# --- Ray Train's controller and the coordinator -----------------------------------------------------------------


def test_a_lost_controller_is_followed_by_the_next_one(running: Life) -> None:
    running.happen(TrainLost(train=1, error="ActorDiedError"))
    assert (running.gang.train, running.gang.status) == (2, Status.GATHERING)
    running.happen(TrainLost(train=1, error="ActorDiedError"))
    assert running.gang.train == 2, "told twice"
    running.join()
    assert running.gang.generation == 2


def test_agents_that_do_not_all_join_mean_another_controller() -> None:
    """A node that drains between placement and actors hangs Ray Train for ever (reference: ray.md, trap 1)."""
    life = Life()
    life.happen(Formed())
    life.join_one(NODES[0])
    life.now_s += SPEC.join_deadline_s + 1
    life.happen(Ticked())
    assert (life.gang.train, life.gang.status) == (2, Status.GATHERING)
    assert "no agent of b has joined within 30 s" in life.last("train_lost").reason
    life.now_s += 1000.0
    life.happen(Ticked())
    assert life.gang.train == 2, "while there is no group to form on nobody is late"


def test_worker_groups_that_never_get_anywhere_stop_the_run(running: Life) -> None:
    for _ in range(MOST_REGROUPS):
        running.join()
    assert running.gang.status is Status.LAUNCHING
    running.join()
    assert running.gang.status is Status.FAILED
    assert "without a new checkpoint" in running.gang.reason


def test_a_coordinator_that_comes_back_takes_the_beats_that_come(running: Life) -> None:
    running.gang = replace(running.gang, beats={}, heard_s={})
    running.now_s += 30.0
    running.happen(Reattached())
    running.beat(9, first=1, committed=5)
    assert (running.gang.status, running.gang.generation, running.gang.step) == (Status.RUNNING, 1, 9)
    assert running.reply().plan == running.gang.plan


# --- whatever happens -------------------------------------------------------------------------------------------


class AnyLife(RuleBasedStateMachine):
    """Any events in any order, also late and repeated ones."""

    def __init__(self) -> None:
        super().__init__()
        self.life = Life(min_ranks=2, max_ranks=5)
        self.grants = 1
        self.highest = 0

    nodes = st.sampled_from([NodeId("a"), NodeId("b"), NodeId("c")])

    @rule(wait_s=st.sampled_from([0.1, 1.0, 10.0, 100.0]))
    def time_passes(self, wait_s: float) -> None:
        self.life.now_s += wait_s
        self.life.happen(Ticked())

    @rule()
    def ray_train_starts(self) -> None:
        if self.life.gang.status not in (Status.LEFT, Status.FINISHED, Status.FAILED):
            self.life.join()

    @rule(node=nodes)
    def one_joins(self, node: NodeId) -> None:
        self.life.attempt += 1
        self.life.join_one(node)

    @rule(
        step=st.integers(-1, 12),
        committed=st.integers(-1, 12),
        exits=st.sampled_from([{}, {"exit_code": 0}, {"exit_code": 0, "stopping": True}]),
        dead=st.sampled_from([{}, {"r0": {"exit_code": -9}}, {"r1": {"idle_s": 7.0}}]),
    )
    def ranks_report(self, step: int, committed: int, exits: dict[str, object], dead: dict[str, object]) -> None:
        if self.life.gang.plan is not None:
            self.life.beat(step, committed=committed, all_ranks=exits, **dead)

    @rule(node=nodes, gpu=st.sampled_from([None, "0", "1"]), save_s=st.sampled_from([None, -1.0, 5.0, 60.0]))
    def evict(self, node: NodeId, gpu: str | None, save_s: float | None) -> None:
        by_s = None if save_s is None else self.life.now_s + save_s
        name = None if gpu is None else GpuId(node + gpu)
        self.life.happen(Evicted(node=node, gpu=name, reason="because", save_by_s=by_s))

    @rule(group=st.integers(1, 3), gpus=st.dictionaries(st.sampled_from("abc"), st.integers(0, 2), min_size=1))
    def grant_again(self, group: int, gpus: dict[str, int]) -> None:
        self.grants += 1
        self.life.happen(Regranted(grant=grant(self.grants, f"group-{group}", **gpus)))

    @rule(
        event=st.sampled_from([LeaveAsked(reason="leave"), Ungranted(), Reattached(), TrainLost(train=1, error="dead")])
    )
    def something(self, event: object) -> None:
        self.life.happen(event)

    @rule(event=st.sampled_from([StopAsked(reason="stop"), TrainEnded(error="gave up")]), luck=st.integers(0, 9))
    def an_end(self, event: object, luck: int) -> None:
        if luck == 0:
            self.life.happen(event)

    @invariant()
    def generations_only_rise(self) -> None:
        gang = self.life.gang
        assert gang.generation >= self.highest
        self.highest = gang.generation
        assert gang.plan is None or gang.plan.generation <= gang.generation

    @invariant()
    def what_agents_are_told_is_fit(self) -> None:
        gang = self.life.gang
        if gang.status not in (Status.LAUNCHING, Status.RUNNING):
            return
        assert gang.plan is not None
        assert gang.plan.generation == gang.generation
        gpus = [slot.gpu for slot in gang.plan.slots]
        assert not gang.evicted & set(gpus), "an evicted GPU holds a rank"
        assert len(set(gpus)) == len(gpus)
        assert gang.min_ranks <= len(gpus) <= gang.max_ranks
        assert {slot.node for slot in gang.plan.slots} <= set(gang.members)

    @invariant()
    def an_end_is_final(self) -> None:
        gang = self.life.gang
        if gang.status in (Status.FINISHED, Status.FAILED):
            for event in (Formed(), Ticked(), StopAsked(reason="again"), Regranted(grant=grant(10_000, "other"))):
                assert advance(gang, event, SPEC, self.life.now_s) == (gang, ())


TestAnyLife = AnyLife.TestCase
TestAnyLife.settings = settings(max_examples=60, stateful_step_count=30)
