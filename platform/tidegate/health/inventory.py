"""A node's GPUs as its agent reports them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tidegate.arbiter.messages import GpuSeen, Seat
from tidegate.health.gangs import straggler_score
from tidegate.health.readings import ListedGpu, Signal
from tidegate.ids import GpuId


def inventory(
    gpus: Sequence[ListedGpu],
    value: Callable[[ListedGpu, Signal], float | None],
    seats: Mapping[GpuId, Seat],
    implausible_above_celsius: float,
) -> tuple[GpuSeen, ...]:
    """`value`: the newest fresh one of a signal; `seats`: whose ranks compute on them."""

    def seen(gpu: ListedGpu) -> GpuSeen:
        read = GpuSeen(
            uuid=GpuId(gpu.uuid),
            index=gpu.index,
            temperature_celsius=_plausible(value(gpu, Signal.GPU_TEMPERATURE), implausible_above_celsius),
            tensor_active_ratio=value(gpu, Signal.GPU_TENSOR_ACTIVE),
            memory_used_bytes=_whole(value(gpu, Signal.GPU_MEMORY_USED)),
            processes=_whole(value(gpu, Signal.GPU_PROCESSES)),
        )
        seat = seats.get(read.uuid)
        if seat is None:
            return read
        return replace(read, run=seat.claim, step_compute_s=seat.compute_s, straggler_score=straggler_score(seat))

    return tuple(seen(gpu) for gpu in gpus)


def _plausible(celsius: float | None, up_to: float) -> float | None:
    """What people are shown and what rules see is the same; NaN is outside."""
    return celsius if celsius is not None and 0.0 < celsius <= up_to else None


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
