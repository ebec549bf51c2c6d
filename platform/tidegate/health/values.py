"""Which numbers can be true. A sentinel, a NaN or a value out of all bounds is no reading: neither healthy nor bad."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from tidegate.health.readings import COUNTERS, EVENTS, Reading, Signal, Status

SENTINELS = frozenset(
    {
        *range(0x7FFFFFF0, 0x7FFFFFF4),
        # As floats the four of 64 bits are one number, and so is everything near it: see `_NO_COUNT_FROM`.
        *range(140_737_488_355_328, 140_737_488_355_332),
        0xFFFFFFFF,
    }
)
"""What DCGM (`dcgm_structs.h`, DCGM_INT32_BLANK … DCGM_FP64_BLANK) and drivers write where they have no number."""
_NO_COUNT_FROM = 9.2e18
"""DCGM_INT64_BLANK is 0x7ffffffffffffff0 (C107)."""

_BOUNDS: Mapping[Signal, tuple[float, float]] = MappingProxyType(
    {
        Signal.GPU_TEMPERATURE: (1, 130),
        Signal.GPU_MEMORY_TEMPERATURE: (1, 130),
        Signal.GPU_MEMORY_LIMIT: (86, 130),
        Signal.GPU_SLOWDOWN_LIMIT: (1, 130),
        Signal.GPU_MARGIN: (-60, 130),
        Signal.GPU_SLOWDOWN_OFFSET: (-60, 9),
        Signal.GPU_CLOCK_REASONS: (0, 0xFFFF),
        Signal.GPU_POWER: (0.1, 5_000),
        Signal.GPU_SM_CLOCK: (1e6, 1e10),
        Signal.GPU_PCIE_GENERATION: (1, 8),
        Signal.GPU_PCIE_GENERATION_MAX: (1, 8),
        Signal.GPU_PCIE_WIDTH: (1, 32),
        Signal.GPU_PCIE_WIDTH_MAX: (1, 32),
        Signal.GPU_NVLINKS: (0, 64),
        Signal.GPU_NVLINKS_DOWN: (0, 64),
        Signal.GPU_NVLINK_BER: (0, 1),
        Signal.GPU_RECOVERY_ACTION: (0, 7),
        Signal.GPU_FABRIC_STATE: (0, 3),
        Signal.GPU_FABRIC_SUMMARY: (0, 3),
        Signal.GPU_FABRIC_MASK: (0, 0xFFFF),
        Signal.GPU_COUNT: (0, 1024),
        Signal.GPU_XID: (1, 9_999),
        Signal.IB_PORT_STATE: (1, 5),
        Signal.IB_PORT_PHYS_STATE: (1, 7),
        Signal.IB_PORT_RATE: (1e6, 1e13),
        Signal.HOST_CLOCK_OFFSET: (-1e9, 1e9),
    }
)
_FLAGS = frozenset(
    {
        Signal.GPU_MIG,
        Signal.GPU_PERSISTENCE,
        Signal.GPU_ECC_ENABLED,
        Signal.GPU_SRAM_THRESHOLD,
        Signal.GPU_ROW_PENDING,
        Signal.GPU_ROW_FAILURE,
        Signal.IB_PORT_PRESENT,
        Signal.IB_PORT_ETHERNET,
        Signal.HOST_DISK_WRITABLE,
    }
)


def _bounds_of(signal: Signal) -> tuple[float, float]:
    if signal in _BOUNDS:
        return _BOUNDS[signal]
    if signal in _FLAGS or signal in EVENTS:
        return (0, 1)
    if signal.endswith("_ratio"):
        return (0, 1.02)  # a share of an interval that two clocks measured
    return (0, _NO_COUNT_FROM) if signal in COUNTERS else (0, 1e18)


BOUNDS: Mapping[Signal, tuple[float, float]] = MappingProxyType({signal: _bounds_of(signal) for signal in Signal})
"""The lowest and the highest value that can be true."""


def value_of(reading: Reading) -> float | None:
    """The reading's value if it has one that can be true."""
    value = reading.value
    if reading.status is not Status.OK or value is None or not math.isfinite(value):
        return None
    if value in SENTINELS and reading.signal is not Signal.IB_SEND_WAIT:  # that counter does stick at 2^32 - 1
        return None
    low, high = BOUNDS[reading.signal]
    return value if low <= value <= high else None
