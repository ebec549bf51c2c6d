"""Medians over a whole gang, whatever node its GPUs are in, and what each node's agent is told of them."""

from __future__ import annotations

import pytest
from story import Story

from tidegate.arbiter.messages import GangPhase, GangReport, GpuSeen, HealthReport, Middle
from tidegate.arbiter.middles import STEP_COMPUTE, middles_of
from tidegate.health.readings import Signal
from tidegate.ids import ClaimId, Generation, GpuId, NodeId

TENSOR = str(Signal.GPU_TENSOR_ACTIVE)


def gpu(node: str, index: int) -> GpuId:
    return GpuId(f"GPU-{node}-{index}")


def told(node: str, *values: float) -> HealthReport:
    gpus = tuple(GpuSeen(uuid=gpu(node, index), index=index) for index in range(2))
    compared = {TENSOR: {gpu(node, index): value for index, value in enumerate(values)}}
    return HealthReport(node=NodeId(node), at_s=0.0, gpus=gpus, compared=compared)


def gang(*nodes: str, compute_s: tuple[float | None, ...] = ()) -> GangReport:
    return GangReport(
        claim=ClaimId("run"),
        at_s=1_000_000.0,
        phase=GangPhase.RUNNING,
        gang_generation=Generation(1),
        step=5,
        world_size=2 * len(nodes),
        gpus=tuple(gpu(node, index) for node in nodes for index in (0, 1)),
        pids=tuple(100 + rank for rank in range(2 * len(nodes))),
        compute_s=compute_s,
    )


def test_the_names_are_the_signals() -> None:
    assert STEP_COMPUTE == Signal.RANK_STEP_COMPUTE


def test_the_median_is_over_all_nodes_of_the_gang_and_over_no_other() -> None:
    reports = [told("a", 0.5, 0.5), told("b", 0.1, 0.1), told("c", 0.6, 0.6), told("stranger", 0.0, 0.0)]
    found = middles_of(gang("a", "b", "c", compute_s=(1.0, 1.0, 2.0, None, 1.0, 1.0)), reports)
    assert found[TENSOR] == Middle(count=6, median=0.5, mad=pytest.approx(0.1))
    assert found[STEP_COMPUTE] == Middle(count=5, median=1.0, mad=0.0)


def test_too_few_are_no_median() -> None:
    assert middles_of(gang("a", compute_s=(1.0, 1.0)), [told("a", 0.5, 0.5)]) == {}


def test_an_agent_hears_of_its_own_ranks_and_of_the_whole_gang() -> None:
    story = Story()
    story.clock.advance(1_000_000.0 - story.clock.now_s())
    story.loop.report_gang(gang("a", "b", compute_s=(1.0, 1.1, 4.0, 1.2)))
    story.loop.report_health(told("a", 0.5, 0.6))
    seats = story.loop.report_health(told("b", 0.1, 0.7))
    story.clock.advance(1.0)
    seats = story.loop.report_health(told("b", 0.1, 0.7))
    seat = seats[gpu("b", 0)]
    assert (seat.claim, seat.pid, seat.compute_s) == ("run", 102, 4.0)
    assert seat.middles[STEP_COMPUTE].median == pytest.approx(1.15)
    assert seat.middles[TENSOR].count == 4
