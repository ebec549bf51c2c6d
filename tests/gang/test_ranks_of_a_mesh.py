"""Which GPUs get a rank where the run's mesh takes only some numbers of them. Pure."""

from __future__ import annotations

from dataclasses import replace

from test_states import Life, grant

from captioned import tiny_run
from tidegate.arbiter.messages import ClaimSpec
from tidegate.gang.beat import FIELDS, SharedProgress, clear, read
from tidegate.gang.events import Evicted
from tidegate.gang.hang import phase_limit_s
from tidegate.gang.order import RunOrder, accepts, mesh_problem
from tidegate.gang.report import report_of
from tidegate.gang.shape import Status
from tidegate.ids import ClaimId, GpuId, NodeId
from tidegate.spec.policy import GangSpec
from tidegate.train.progress import Phase


def meshed(gpus: dict[str, int], accepts: tuple[int, ...], together: tuple[int, ...], min_ranks: int = 2) -> Life:
    life = Life(min_ranks=min_ranks, max_ranks=sum(gpus.values()))
    life.gang = replace(life.gang, grant=grant(**gpus), accepts=accepts, together=together)
    life.join()
    return life


def test_only_numbers_of_ranks_that_the_mesh_can_be_made_of() -> None:
    """Two replicas of two ranks: of five GPUs four are used, after a loss two; one alone is too few."""
    life = meshed({"a": 2, "b": 3}, accepts=(2, 4, 6), together=(1,))
    assert life.gang.plan is not None
    assert [slot.gpu for slot in life.gang.plan.slots] == ["a0", "a1", "b0", "b1"]
    life.beat(5, first=1, committed=5)
    life.happen(Evicted(node=NodeId("a"), gpu=GpuId("a0"), reason="hot"))
    assert [slot.gpu for slot in life.gang.plan.slots] == ["a1", "b0", "b1", "b2"]
    life.beat(6, first=6, committed=6)
    life.happen(Evicted(node=NodeId("b"), gpu=GpuId("b0"), reason="hot"))
    assert [slot.gpu for slot in life.gang.plan.slots] == ["a1", "b1"]
    assert [slot.local_rank for slot in life.gang.plan.slots] == [0, 0]
    life.happen(Evicted(node=NodeId("b"), gpu=GpuId("b1"), reason="hot"))
    assert [slot.gpu for slot in life.gang.plan.slots] == ["a1", "b2"]
    life.happen(Evicted(node=NodeId("b"), gpu=GpuId("b2"), reason="hot"))
    assert life.gang.status is Status.SHORT
    assert life.gang.reason == "1 GPUs are left, of which the run's mesh can use 0, at least 2 are needed; hot"


def test_a_shard_group_loses_its_whole_node() -> None:
    """HSDP with a replica a node: one bad GPU takes its node's replica out, and no group reaches over two nodes."""
    life = meshed({"a": 4, "b": 4, "c": 4}, accepts=(4, 8, 12), together=(4, 1))
    life.beat(5, first=1, committed=5)
    life.happen(Evicted(node=NodeId("b"), gpu=GpuId("b2"), reason="hot"))
    assert life.gang.plan is not None
    assert [slot.node for slot in life.gang.plan.slots] == ["a"] * 4 + ["c"] * 4
    assert not life.gang.changing


def test_tensor_peers_stay_on_one_node() -> None:
    """Of three GPUs a pair is used; a shard group larger than a node has only pairs to keep together."""
    life = meshed({"a": 3, "b": 3}, accepts=(4, 6), together=(8, 2))
    assert life.gang.plan is not None
    assert [slot.gpu for slot in life.gang.plan.slots] == ["a0", "a1", "b0", "b1"]


def test_a_run_that_can_use_none_of_its_gpus_is_refused() -> None:
    def problem(config: dict[str, object], least: int, most: int) -> str | None:
        claim = ClaimSpec(name="a", claim_class="pretrain", min_gpus=least, max_gpus=most, owner="me")
        return mesh_problem(RunOrder(claim=claim, config=tiny_run(**config), data_dir="d", run_dir="r"))

    hsdp: dict[str, object] = {"parallel": {"replicate": "rest", "shard": 4}, "global_batch": 8}
    assert problem(hsdp, 4, 16) is None
    assert "of 5 to 7 GPUs the run can use at most 4: parallel is rest × 4 × 1" in str(problem(hsdp, 5, 7))
    assert "of 1 to 3 GPUs the run can use none" in str(problem(hsdp, 1, 3))
    assert "at most 8" in str(problem(hsdp, 9, 16)), "each part of the batch needs a sample"
    claim = ClaimSpec(name="a", claim_class="pretrain", min_gpus=1, max_gpus=7, owner="me")
    assert accepts(RunOrder(claim=claim, config=tiny_run(), data_dir="d", run_dir="r")) == ()


def test_samples_have_a_limit_of_their_own() -> None:
    """A grid may take longer than a step."""
    assert phase_limit_s("sampling", (0.1,), GangSpec(sample_deadline_s=77.0)) == 77.0
    assert phase_limit_s("stepping", (0.1,), GangSpec(sample_deadline_s=77.0)) == 5.0


def test_the_report_has_the_newest_pace() -> None:
    running = meshed({"a": 2}, accepts=(), together=(1,))
    running.beat(8, first=1, r1={"images_per_s": 120.0, "mfu": 0.4})
    report = report_of(running.gang, ClaimId("c"), 0.0, over=False)
    assert (report.images_per_s, report.mfu) == (120.0, 0.4)


def test_a_beat_has_pace_and_phase() -> None:
    cells = [0.0] * FIELDS
    clear(cells)
    assert (read(cells, 0, 1, 0).images_per_s, read(cells, 0, 1, 0).mfu) == (None, None)
    progress = SharedProgress(cells)
    progress.speed(120.0, 0.4)
    progress.phase(Phase.SAMPLING)
    beat = read(cells, 0, 1, 0)
    assert (beat.images_per_s, beat.mfu, beat.phase) == (120.0, 0.4, "sampling")
    progress.speed(110.0, None)
    assert read(cells, 0, 1, 0).mfu is None
