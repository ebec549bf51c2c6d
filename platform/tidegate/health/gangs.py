"""What a node's agent and the arbiter tell each other of gangs: GPUs are compared over all nodes of one. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache

from tidegate.arbiter.messages import Seat
from tidegate.health.evidence import Guard, Peers
from tidegate.health.readings import Reading, Signal, Status
from tidegate.health.rules import rules_of
from tidegate.health.values import value_of
from tidegate.ids import ClaimId, GpuId, NodeId
from tidegate.spec.policy import HealthSpec


@lru_cache(maxsize=16)
def compared_signals(spec: HealthSpec) -> Mapping[Signal, tuple[Guard, ...]]:
    """Those that rules compare over a gang, and what shows that a GPU is at work. The ranks' own are not among them."""
    rules = [rule for rule in rules_of(spec) if rule.gang and rule.signal is not Signal.RANK_STEP_COMPUTE]
    return {rule.signal: rule.while_ for rule in reversed(rules)}


def compared(
    gpus: Iterable[GpuId], newest: Callable[[str, Signal], Reading | None], spec: HealthSpec
) -> dict[str, dict[GpuId, float]]:
    """What this node's GPUs add to the comparison: signal -> GPU that is at work -> value."""
    members = tuple(gpus)

    def value(gpu: str, signal: Signal) -> float | None:
        reading = newest(gpu, signal)
        return value_of(reading) if reading is not None else None

    def at_work(gpu: str, guards: tuple[Guard, ...]) -> bool:
        seen = [(guard, value(gpu, guard.signal)) for guard in guards]
        return all(found is not None and guard.at_least <= found <= guard.at_most for guard, found in seen)

    told: dict[str, dict[GpuId, float]] = {}
    for signal, guards in compared_signals(spec).items():
        found = {gpu: value(gpu, signal) for gpu in members if at_work(gpu, guards)}
        told[str(signal)] = {gpu: number for gpu, number in found.items() if number is not None}
    return {signal: values for signal, values in told.items() if values}


def whole_gangs(seats: Mapping[GpuId, Seat]) -> dict[tuple[ClaimId, Signal], Peers]:
    """What the arbiter said of the gangs on this node, as the judge takes it."""
    known = {str(signal): signal for signal in Signal}
    return {
        (seat.claim, known[signal]): Peers(count=middle.count, median=middle.median, mad=middle.mad)
        for seat in seats.values()
        for signal, middle in seat.middles.items()
        if signal in known
    }


def step_times(seats: Mapping[GpuId, Seat], node: NodeId, now_s: float) -> list[Reading]:
    """What the ranks on this node's GPUs compute in a step, as a source would tell it."""
    return [
        Reading(
            at_s=now_s,
            node=node,
            subject=gpu,
            signal=Signal.RANK_STEP_COMPUTE,
            value=seat.compute_s,
            status=Status.OK,
            detail=f"of run {seat.claim}",
        )
        for gpu, seat in seats.items()
        if seat.compute_s is not None
    ]


def straggler_score(seat: Seat) -> float | None:
    """The gang's median by the rank's own: below 1 it is slower than its peers (NVRx's relative score)."""
    middle = seat.middles.get(str(Signal.RANK_STEP_COMPUTE))
    if middle is None or not seat.compute_s:
        return None
    return middle.median / seat.compute_s
