"""GPUs are compared over all nodes of their gang: what an agent makes of what the arbiter says of the others."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from tests.health.series import NODE, SPEC, reading

from tidegate.arbiter.messages import Middle, Seat
from tidegate.health.gangs import compared, step_times, straggler_score, whole_gangs
from tidegate.health.history import History
from tidegate.health.judge import Judgement, judge
from tidegate.health.readings import Reading, Signal, Status
from tidegate.ids import ClaimId, GpuId

GPUS = (GpuId("GPU-0"), GpuId("GPU-1"))
STEP = str(Signal.RANK_STEP_COMPUTE)
TENSOR = str(Signal.GPU_TENSOR_ACTIVE)
CLOCK = str(Signal.GPU_SM_CLOCK)


def seats(compute_s: float | None = None, **middles: Middle) -> dict[GpuId, Seat]:
    return {gpu: Seat(claim=ClaimId("run"), compute_s=compute_s, middles=middles) for gpu in GPUS}


def look(history: History, at_s: float, told: Mapping[GpuId, Seat], **values: float) -> Judgement:
    seen = [reading(at_s, Signal(signal), value, gpu) for signal, value in values.items() for gpu in GPUS]
    gangs = {gpu: seat.claim for gpu, seat in told.items()}
    return judge([*seen, *step_times(told, NODE, at_s)], history, SPEC, at_s, gangs, whole_gangs(told))


def play(seconds: int, told: Mapping[GpuId, Seat], **values: float) -> set[str]:
    """Rules that stand after so many looks, a second apart."""
    history, rules = History(), set[str]()
    for second in range(seconds):
        judgement = look(history, 1000.0 + second, told, **values)
        history, rules = judgement.history, {verdict.rule for verdict in judgement.verdicts}
    return rules


BUSY = {str(Signal.GPU_PROCESSES): 1.0, str(Signal.GPU_UTILIZATION): 1.0}


def test_a_node_whose_gpus_are_all_slow_is_found_by_the_other_nodes_of_its_gang() -> None:
    """Within the node nobody is odd: both do 0.1, and two would be too few to say."""
    slow = {**BUSY, TENSOR: 0.1, CLOCK: 1.0e9}
    whole = {TENSOR: Middle(count=16, median=0.5, mad=0.01), CLOCK: Middle(count=16, median=1.9e9, mad=1e7)}
    assert play(70, seats(), **slow) == set()
    assert {"tensor_warn", "sm_clock_warn", "sm_clock", "tensor"} <= play(90, seats(**whole), **slow)


def test_tensor_activity_alone_never_evicts_whatever_the_other_nodes_do() -> None:
    """DCGM 303: a second witness is asked for."""
    whole = {TENSOR: Middle(count=16, median=0.5, mad=0.01)}
    assert play(90, seats(**whole), **BUSY, **{TENSOR: 0.0}) == {"tensor_warn"}


@pytest.mark.parametrize(("share", "rules"), [(1.09, set()), (1.11, {"step_time_warn"}), (2.0, {"step_time_warn"})])
def test_a_rank_that_computes_longer_than_its_gang_warns_and_needs_a_witness_to_leave(
    share: float, rules: set[str]
) -> None:
    assert play(70, seats(share, **{STEP: Middle(count=16, median=1.0, mad=0.01)})) == rules


def test_with_the_gpus_own_evidence_it_leaves_with_the_next_checkpoint() -> None:
    whole = {STEP: Middle(count=16, median=1.0, mad=0.01), TENSOR: Middle(count=16, median=0.5, mad=0.01)}
    assert "step_time" in play(90, seats(2.0, **whole), **BUSY, **{TENSOR: 0.2})


def test_what_an_agent_adds_is_of_gpus_at_work_and_can_be_true() -> None:
    values = {
        ("GPU-0", Signal.GPU_PROCESSES): 1.0,
        ("GPU-0", Signal.GPU_UTILIZATION): 0.9,
        ("GPU-0", Signal.GPU_TENSOR_ACTIVE): 0.4,
        ("GPU-0", Signal.GPU_POWER): 2_147_483_632.0,  # DCGM_INT32_BLANK: no reading
        ("GPU-1", Signal.GPU_PROCESSES): 0.0,
        ("GPU-1", Signal.GPU_TENSOR_ACTIVE): 0.0,
    }

    def newest(gpu: str, signal: Signal) -> Reading | None:
        value = values.get((gpu, signal))
        return None if value is None else reading(1000.0, signal, value, gpu, status=Status.OK)

    assert compared(GPUS, newest, SPEC) == {TENSOR: {"GPU-0": 0.4}}


def test_the_score_is_one_among_equals_and_less_for_the_slow() -> None:
    told = seats(2.0, **{STEP: Middle(count=4, median=1.0, mad=0.0)})
    assert straggler_score(told[GPUS[0]]) == 0.5
    assert straggler_score(Seat(claim=ClaimId("run"), compute_s=1.0)) is None
