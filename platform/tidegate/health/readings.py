"""What sources say: one `Reading` for each thing they looked at. A value that isn't there is never a healthy value."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from tidegate.ids import GpuId, NodeId


class Signal(StrEnum):
    """What was looked at. Signals with a unit carry it in their name."""

    GPU_ANSWERS = "gpu_answers"
    """1.0 when the GPU can be opened and asked; otherwise the status and cause say what it said instead."""
    GPU_TEMPERATURE = "gpu_temperature_celsius"
    GPU_MARGIN = "gpu_thermal_margin_celsius"
    """Degrees left to the slowdown limit, signed."""
    GPU_TENSOR_ACTIVE = "gpu_tensor_active_ratio"
    """Share of the time since the last reading in which tensor cores worked, 0 to 1."""
    GPU_MEMORY_USED = "gpu_memory_used_bytes"
    GPU_PROCESSES = "gpu_processes"
    """Compute processes that the driver lists on the GPU."""
    NVML_ANSWERS = "nvml_answers"
    """1.0 when the driver's library answers at all; its subject is the node."""


class Status(StrEnum):
    OK = "ok"
    UNSUPPORTED = "unsupported"
    """This GPU or driver has no such value: never an alarm, not asked again."""
    NO_PERMISSION = "no_permission"
    LOST = "lost"
    """The subject itself is gone or wants a reset."""
    TIMEOUT = "timeout"
    STALE = "stale"
    """No fresh value this time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    at_s: float
    """When the value was taken."""
    node: NodeId
    subject: str
    """The GPU's UUID, or the node's id where the signal is the node's."""
    signal: Signal
    value: float | None
    """In the signal's unit; None unless the status is ok."""
    status: Status
    cause: str | None = None
    """Why there is no value, in the source's own word (e.g. GPU_IS_LOST): what rules match."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedGpu:
    uuid: GpuId
    index: int
    """Its place in NVML's list: good for showing, never for identity (C104)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """All that one source said at one look."""

    gpus: tuple[ListedGpu, ...]
    """In NVML's order, with those that are listed but do not answer."""
    readings: tuple[Reading, ...]
    error: str | None = None
    """Why the source as a whole has nothing to say."""


class Source(Protocol):
    """One kind of sensor. `read` may block, even for ever: it is called in a thread of its own, one call at a time."""

    def read(self) -> Round: ...
