"""What is asked of a GPU and how often: NVML calls and field values, in our units, each with its own return code."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pynvml

from tidegate.health.readings import Signal, Status

_PREFIX = "NVML_ERROR_"
CAUSES = {getattr(pynvml, name): name.removeprefix(_PREFIX) for name in dir(pynvml) if name.startswith(_PREFIX)}
"""NVML's return codes by name, e.g. 15 -> GPU_IS_LOST."""

STATUSES = {
    "NOT_SUPPORTED": Status.UNSUPPORTED,
    "FUNCTION_NOT_FOUND": Status.UNSUPPORTED,
    "ARGUMENT_VERSION_MISMATCH": Status.UNSUPPORTED,
    "DEPRECATED": Status.UNSUPPORTED,
    "INVALID_ARGUMENT": Status.UNSUPPORTED,
    "NO_PERMISSION": Status.NO_PERMISSION,
    "TIMEOUT": Status.TIMEOUT,
    "GPU_IS_LOST": Status.LOST,
    "RESET_REQUIRED": Status.LOST,
    "GPU_NOT_FOUND": Status.LOST,
    "IRQ_ISSUE": Status.LOST,
}
"""What a code says about the value; a code that isn't named (NO_DATA, NOT_READY, UNKNOWN, …): no value this time.

INVALID_ARGUMENT is what older drivers say of a field or a link that they do not know."""

OLDER_CALL_HELPS = ("FUNCTION_NOT_FOUND", "ARGUMENT_VERSION_MISMATCH", "DEPRECATED")

Answer = float | str
"""A value in its signal's unit, or the cause why there is none."""


def cause_of(error: pynvml.NVMLError) -> str:
    return code_name(error.value)


def code_name(code: int) -> str:
    return CAUSES.get(code, f"CODE_{code}")


def unsupported(answer: Answer) -> bool:
    return isinstance(answer, str) and STATUSES.get(answer) is Status.UNSUPPORTED


@dataclass(frozen=True, slots=True)
class Ask:
    """One trip to the driver for one or several signals."""

    signals: tuple[Signal, ...]
    call: Callable[[Any], Sequence[Answer]]
    """Of a handle: as many answers as signals. An NVMLError speaks for all of them."""


def one(signal: Signal, call: Callable[[Any], float], times: float = 1.0) -> Ask:
    return Ask((signal,), lambda handle: (call(handle) * times,))


@dataclass(frozen=True, slots=True)
class Field:
    signal: Signal
    field_id: int
    times: float = 1.0
    signed: bool = False
    zero_is_none: bool = False


class FieldBatch:
    """Field values of one set of ids, in one trip to the driver.

    pynvml's own function builds and takes apart a Python object for each value; with a node's thousand values every few
    seconds that was most of what an agent cost, so the array is made once and its bytes are read as they are.
    """

    def __init__(self, ids: Sequence[tuple[int, int]]) -> None:
        """`ids`: (field, scope)."""
        self._array = (pynvml.c_nvmlFieldValue_t * len(ids))()
        for slot, (field_id, scope) in zip(self._array, ids, strict=True):
            slot.fieldId, slot.scopeId = field_id, scope
        self._count = ctypes.c_int32(len(ids))

    def read(self, handle: Any) -> list[Answer]:
        """A value or its own cause for each id.

        Raises:
            pynvml.NVMLError: the GPU as a whole did not answer.
        """
        call = pynvml._nvmlGetFunctionPointer("nvmlDeviceGetFieldValues")
        code = call(handle, self._count, ctypes.byref(self._array))
        if code != pynvml.NVML_SUCCESS:
            raise pynvml.NVMLError(code)
        return [
            _decoded(kind, bits) if code == pynvml.NVML_SUCCESS else code_name(code)
            for kind, code, bits in _FIELD_VALUE.iter_unpack(self._array)
        ]


_FIELD_VALUE = struct.Struct("=24xii8s")
"""`nvmlFieldValue_t`: ids, times, then the value's type, its return code and its eight bytes."""
_FORMATS = {
    pynvml.NVML_VALUE_TYPE_DOUBLE: struct.Struct("=d"),
    pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: struct.Struct("=I4x"),
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG: struct.Struct("=Q"),
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: struct.Struct("=Q"),
    pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: struct.Struct("=q"),
    pynvml.NVML_VALUE_TYPE_SIGNED_INT: struct.Struct("=i4x"),
    pynvml.NVML_VALUE_TYPE_UNSIGNED_SHORT: struct.Struct("=H6x"),
}


def _decoded(kind: int, bits: bytes) -> Answer:
    """The value as the type that it says it has."""
    form = _FORMATS.get(kind)
    return float(form.unpack(bits)[0]) if form is not None else "UNKNOWN_TYPE"


def fields(*wanted: Field) -> Ask:
    """Many field values in one trip; each has its own code."""
    batch = FieldBatch([(field.field_id, 0) for field in wanted])

    def call(handle: Any) -> list[Answer]:
        return [_in_unit(field, answer) for field, answer in zip(wanted, batch.read(handle), strict=True)]

    return Ask(tuple(field.signal for field in wanted), call)


def _in_unit(field: Field, answer: Answer) -> Answer:
    if isinstance(answer, str):
        return answer
    if field.signed and answer >= _TWO_TO_31:
        # The driver types some offsets as unsigned though they are below 0 (the …_TLIMIT fields).
        answer -= 2.0 * _TWO_TO_31
    return "NOT_SUPPORTED" if field.zero_is_none and answer == 0 else answer * field.times


_TWO_TO_31 = 2.0**31


def _clock_reasons(handle: Any) -> int:
    try:
        return int(pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    except pynvml.NVMLError as error:
        if cause_of(error) not in OLDER_CALL_HELPS:
            raise
    return int(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))


def _sm_clock(handle: Any) -> int:
    return int(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM))


def _sm_clock_max(handle: Any) -> int:
    return int(pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM))


def _memory_clock(handle: Any) -> int:
    return int(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM))


def _memory_used(handle: Any) -> int:
    """Bytes, without what the driver keeps for itself: only the second layout tells the two apart."""
    return int(pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used)


def _processes(handle: Any) -> int:
    return len(pynvml.nvmlDeviceGetComputeRunningProcesses(handle))


def _utilization(handle: Any) -> float:
    return float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)


def _ecc(kind: int, counter: int) -> Callable[[Any], float]:
    return lambda handle: float(pynvml.nvmlDeviceGetTotalEccErrors(handle, kind, counter))


def _threshold(number: int) -> Callable[[Any], float]:
    return lambda handle: float(pynvml.nvmlDeviceGetTemperatureThreshold(handle, number))


def _sram(handle: Any) -> float:
    status = pynvml.c_nvmlEccSramErrorStatus_v1_t()
    pynvml.nvmlDeviceGetSramEccErrorStatus(handle, ctypes.byref(status))
    return float(status.bThresholdExceeded)


def _fabric(handle: Any) -> list[Answer]:
    info = pynvml.c_nvmlGpuFabricInfo_v3_t()
    pynvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
    if info.state == pynvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED:
        return ["NOT_SUPPORTED"] * 3
    return [float(info.state), float(info.healthSummary) if info.healthSummary else "NOT_SUPPORTED", info.healthMask]


def _rows(handle: Any) -> list[Answer]:
    return [float(count) for count in pynvml.nvmlDeviceGetRemappedRows(handle)]


_NANOSECONDS = 1e-9
_MILLI = 1e-3
_MEGA = 1e6

HOT = (
    fields(
        Field(Signal.GPU_RECOVERY_ACTION, pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION),
        Field(Signal.GPU_MEMORY_TEMPERATURE, pynvml.NVML_FI_DEV_MEMORY_TEMP, zero_is_none=True),
    ),
    one(Signal.GPU_CLOCK_REASONS, _clock_reasons),
)
"""Each look, after temperature and margin."""

MIDDLE = (
    fields(
        Field(Signal.GPU_THROTTLED_POWER_CAP, pynvml.NVML_FI_DEV_PERF_POLICY_POWER, _NANOSECONDS),
        Field(Signal.GPU_THROTTLED_SYNC_BOOST, pynvml.NVML_FI_DEV_PERF_POLICY_SYNC_BOOST, _NANOSECONDS),
        Field(
            Signal.GPU_THROTTLED_SW_THERMAL,
            pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN,
            _NANOSECONDS,
        ),
        Field(
            Signal.GPU_THROTTLED_HW_THERMAL,
            pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN,
            _NANOSECONDS,
        ),
        Field(
            Signal.GPU_THROTTLED_POWER_BRAKE,
            pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN,
            _NANOSECONDS,
        ),
        Field(Signal.GPU_PCIE_REPLAYS, pynvml.NVML_FI_DEV_PCIE_REPLAY_COUNTER),
        Field(Signal.GPU_PCIE_NONFATAL, pynvml.NVML_FI_DEV_PCIE_COUNT_NON_FATAL_ERROR),
        Field(Signal.GPU_PCIE_FATAL, pynvml.NVML_FI_DEV_PCIE_COUNT_FATAL_ERROR),
    ),
    one(Signal.GPU_SM_CLOCK, _sm_clock, _MEGA),
    one(Signal.GPU_POWER, pynvml.nvmlDeviceGetPowerUsage, _MILLI),
    one(Signal.GPU_UTILIZATION, _utilization, 0.01),
    one(Signal.GPU_MEMORY_USED, _memory_used),
    one(Signal.GPU_PROCESSES, _processes),
    one(Signal.GPU_PCIE_GENERATION, pynvml.nvmlDeviceGetCurrPcieLinkGeneration),
    one(Signal.GPU_PCIE_WIDTH, pynvml.nvmlDeviceGetCurrPcieLinkWidth),
)
"""Every five seconds, and GPM and NVLink's counters with them."""

_CORRECTED, _UNCORRECTED = pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
SLOW = (
    one(Signal.GPU_PERSISTENCE, lambda handle: float(pynvml.nvmlDeviceGetPersistenceMode(handle))),
    one(Signal.GPU_ECC_ENABLED, lambda handle: float(pynvml.nvmlDeviceGetEccMode(handle)[0])),
    one(Signal.GPU_ECC_CORRECTED, _ecc(_CORRECTED, pynvml.NVML_VOLATILE_ECC)),
    one(Signal.GPU_ECC_UNCORRECTED, _ecc(_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)),
    one(Signal.GPU_ECC_CORRECTED_EVER, _ecc(_CORRECTED, pynvml.NVML_AGGREGATE_ECC)),
    one(Signal.GPU_ECC_UNCORRECTED_EVER, _ecc(_UNCORRECTED, pynvml.NVML_AGGREGATE_ECC)),
    one(Signal.GPU_SRAM_THRESHOLD, _sram),
    Ask(
        (
            Signal.GPU_ROWS_CORRECTABLE,
            Signal.GPU_ROWS_UNCORRECTABLE,
            Signal.GPU_ROW_PENDING,
            Signal.GPU_ROW_FAILURE,
        ),
        _rows,
    ),
    one(
        Signal.GPU_BANKS_EXHAUSTED,
        lambda handle: float(getattr(pynvml.nvmlDeviceGetRowRemapperHistogram(handle), "none")),  # noqa: B009
    ),
    Ask((Signal.GPU_FABRIC_STATE, Signal.GPU_FABRIC_SUMMARY, Signal.GPU_FABRIC_MASK), _fabric),
    one(Signal.GPU_PCIE_GENERATION_MAX, pynvml.nvmlDeviceGetMaxPcieLinkGeneration),
    one(Signal.GPU_PCIE_WIDTH_MAX, pynvml.nvmlDeviceGetMaxPcieLinkWidth),
    one(Signal.GPU_MEMORY_CLOCK, _memory_clock, _MEGA),
    one(Signal.GPU_ENERGY, pynvml.nvmlDeviceGetTotalEnergyConsumption, _MILLI),
    one(Signal.GPU_SM_CLOCK_MAX, _sm_clock_max, _MEGA),
    one(Signal.GPU_POWER_LIMIT, pynvml.nvmlDeviceGetEnforcedPowerLimit, _MILLI),
    one(Signal.GPU_MIG, lambda handle: float(pynvml.nvmlDeviceGetMigMode(handle)[0])),
    one(Signal.GPU_SLOWDOWN_LIMIT, _threshold(pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)),
    one(Signal.GPU_MEMORY_LIMIT, _threshold(pynvml.NVML_TEMPERATURE_THRESHOLD_MEM_MAX)),
    fields(Field(Signal.GPU_SLOWDOWN_OFFSET, pynvml.NVML_FI_DEV_TEMPERATURE_SLOWDOWN_TLIMIT, signed=True)),
)
"""Every minute: what changes seldom, and what is a state rather than an event."""
