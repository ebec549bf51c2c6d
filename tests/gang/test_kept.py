"""What a coordinator's next process knows of its run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tidegate.arbiter.messages import Grant, GrantedNode
from tidegate.gang.events import LeaveAsked
from tidegate.gang.kept import KEPT, Kept, read_kept, same_to_keep, write_kept
from tidegate.gang.plan import Member, Plan, RankBeat, Slot
from tidegate.gang.shape import Drain, Gang, Status
from tidegate.ids import ClaimId, Generation, GpuId, NodeId
from tidegate.spec.policy import GangSpec

NODE, GPUS = NodeId("a" * 56), (GpuId("GPU-0"), GpuId("GPU-1"))
GRANT = Grant(
    claim=ClaimId("run"),
    generation=Generation(3),
    placement_group="tidegate-run-1",
    gpus_per_node=2,
    nodes=(GrantedNode(node=NODE, address="10.0.0.1", gpus=GPUS),),
)
BEAT = RankBeat(
    rank=0,
    pid=100,
    exit_code=None,
    step=8,
    first_step=1,
    first_step_at_s=1.0,
    phase="stepping",
    idle_s=0.1,
    progress_at_s=2.0,
    loss=None,
    committed_step=5,
)
GANG = Gang(
    grant=GRANT,
    min_ranks=1,
    max_ranks=2,
    steps=100,
    status=Status.RUNNING,
    generation=Generation(4),
    train=2,
    members={NODE: Member(node=NODE, agent="a.1", address="10.0.0.1", port=7000, times={"warm": 1.0})},
    evicted=frozenset({GPUS[1]}),
    drain=Drain(gpus=frozenset(GPUS), reason="the node drains", by_s=99.0),
    plan=Plan(
        generation=Generation(4),
        master_address="10.0.0.1",
        master_port=7000,
        slots=(Slot(rank=0, local_rank=0, node=NODE, gpu=GPUS[0]),),
    ),
    step=8,
    best_step=9,
    committed_step=5,
    committed_at_s=1.5,
    barren=(frozenset({NODE}),),
    hung_in=(7, "stepping"),
    pace=(0.1, 0.2),
    leave=LeaveAsked(reason="a stronger claim", by_s=120.0),
)
KEPT_NOW = Kept(actor="me", claim=ClaimId("run"), spec=GangSpec(), gang=GANG, stop_reason="stop", led=2)


def test_all_of_it_is_read_back(tmp_path: Path) -> None:
    write_kept(tmp_path, KEPT_NOW)
    assert read_kept(tmp_path, "me") == (KEPT_NOW, 4)


def test_what_beats_tell_is_not_kept_and_writes_no_file(tmp_path: Path) -> None:
    moved = replace(
        GANG,
        beats={0: BEAT},
        heard_s={NODE: 3.0},
        step=9,
        committed_step=8,
        pace=(0.3,),
        members={NODE: replace(GANG.members[NODE], port=7001)},
    )
    assert same_to_keep(KEPT_NOW, replace(KEPT_NOW, gang=moved))
    write_kept(tmp_path, replace(KEPT_NOW, gang=moved))
    kept, _ = read_kept(tmp_path, "me")
    assert kept.gang is not None
    assert (kept.gang.beats, kept.gang.heard_s, kept.gang.step) == ({}, {}, 9)


def test_whatever_else_changes_is_kept_at_once() -> None:
    changes: tuple[dict[str, object], ...] = (
        {"status": Status.LAUNCHING},
        {"generation": Generation(5)},
        {"plan": None},
        {"evicted": frozenset()},
        {"members": {NODE: replace(GANG.members[NODE], agent="a.2")}},
        {"leave": None},
        {"drain": None},
        {"train": 3},
    )
    for change in changes:
        assert not same_to_keep(KEPT_NOW, replace(KEPT_NOW, gang=replace(GANG, **change))), change  # type: ignore[arg-type]


def test_another_run_in_the_folder_takes_over_nothing_but_the_generation(tmp_path: Path) -> None:
    """Its own must be higher than any that an orphan of the run before may still write."""
    write_kept(tmp_path, KEPT_NOW)
    assert read_kept(tmp_path, "somebody else") == (Kept(actor="somebody else"), 4)


def test_a_file_of_another_release_is_no_reason_not_to_run(tmp_path: Path) -> None:
    assert read_kept(tmp_path, "me") == (Kept(actor="me"), 0)
    (tmp_path / KEPT).write_text('{"actor": "me", "gang": {"nodes": []}}', encoding="utf-8")
    assert read_kept(tmp_path, "me") == (Kept(actor="me"), 0)
