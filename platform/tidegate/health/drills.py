"""Faults that a person makes up to see what follows: readings as the sources would give them. Pure."""

from __future__ import annotations

from enum import StrEnum

from tidegate.errors import TidegateError
from tidegate.health.readings import DEADLINE_MISSED, Reading, Signal, Status
from tidegate.ids import NodeId

DRILL = "a drill"
"""Stands in the evidence of what a drill brings about."""


class Drill(StrEnum):
    HOT_GPU = "hot-gpu"
    XID = "xid"
    IB_FLAP = "ib-flap"
    HANG = "hang"
    """Not a reading: a rank is stopped for real (`HealthAgent.hang`)."""
    NVML_HANG = "nvml-hang"


class DrillError(TidegateError):
    """The node has nothing that such a fault could befall; the text says how to name one."""


def readings_of(drill: Drill, node: NodeId, subject: str, hot_celsius: float, now_s: float) -> list[Reading]:
    """`subject`: the GPU or the port; `hot_celsius`: what the hot GPU shows. All have happened just before `now_s`."""
    match drill:
        case Drill.HOT_GPU:
            return [_reading(now_s, node, subject, Signal.GPU_TEMPERATURE, hot_celsius)]
        case Drill.XID:
            return [_reading(now_s, node, subject, Signal.GPU_XID, 79.0)]
        case Drill.IB_FLAP:
            states = (4.0, 1.0, 4.0, 1.0, 4.0)
            times_s = (now_s - 0.1 * left for left in range(len(states) - 1, -1, -1))
            pairs = zip(times_s, states, strict=True)
            return [_reading(at_s, node, subject, Signal.IB_PORT_STATE, state) for at_s, state in pairs]
        case Drill.HANG:
            return []
        case Drill.NVML_HANG:
            return [_missed(now_s - 0.1 * left, node) for left in (2, 1, 0)]


def _reading(at_s: float, node: NodeId, subject: str, signal: Signal, value: float) -> Reading:
    return Reading(
        at_s=at_s, node=node, subject=subject, signal=signal, value=value, status=Status.OK, detail=DRILL
    )  # fmt: skip


def _missed(at_s: float, node: NodeId) -> Reading:
    return Reading(
        at_s=at_s,
        node=node,
        subject=node,
        signal=Signal.NVML_ANSWERS,
        value=None,
        status=Status.TIMEOUT,
        cause=DEADLINE_MISSED,
        detail=DRILL,
    )
