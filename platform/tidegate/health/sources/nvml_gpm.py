"""How busy a GPU is, by NVML's GPM: two samples and what happened between them (Hopper and newer)."""

from __future__ import annotations

import struct
import time
from typing import Any

import pynvml

from tidegate.health.readings import Signal
from tidegate.health.sources.nvml_values import Answer, cause_of, code_name

_MIN_WINDOW_S = 0.1
"""Samples closer than this are refused or mean nothing (`nvml.h`, nvmlGpmMetricsGet)."""
_GIVE_UP_AFTER = 3
"""So many refusals in a row and not one value ever: this GPU has no GPM, whatever it says of itself (C097)."""
_KEEP_ASKING = frozenset({"TIMEOUT", "GPU_IS_LOST", "RESET_REQUIRED", "GPU_NOT_FOUND", "UNKNOWN", "IRQ_ISSUE"})
"""Codes that speak of the GPU's state and not of GPM."""

_MIB = 2.0**20
_METRICS = (
    # signal, metric, its units in one of ours, highest value that can be true
    (Signal.GPU_TENSOR_ACTIVE, pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL, 100.0, 100.0),
    (Signal.GPU_SM_ACTIVE, pynvml.NVML_GPM_METRIC_SM_UTIL, 100.0, 100.0),
    (Signal.GPU_DRAM_ACTIVE, pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL, 100.0, 100.0),
    (Signal.GPU_PCIE_SENT, pynvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC, 1.0 / _MIB, float("inf")),
    (Signal.GPU_PCIE_RECEIVED, pynvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC, 1.0 / _MIB, float("inf")),
    (Signal.GPU_NVLINK_SENT, pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC, 1.0 / _MIB, float("inf")),
    (Signal.GPU_NVLINK_RECEIVED, pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC, 1.0 / _MIB, float("inf")),
)
SIGNALS = tuple(signal for signal, *_ in _METRICS)

_METRIC = struct.Struct("=4xid24x")
"""`nvmlGpmMetric_t`: its id, return code and value, then its names."""
_FIRST_METRIC = pynvml.c_nvmlGpmMetricsGet_t.metrics.offset
_END_OF_METRICS = _FIRST_METRIC + len(_METRICS) * _METRIC.size


class Activity:
    """One GPU's activity since it was last asked. There is no sleep: the window is the caller's own period.

    Not for several threads at once.
    """

    def __init__(self) -> None:
        self._older: Any = None
        self._newer: Any = None
        self._newer_at_s: float | None = None
        self._request: Any = None
        self._refusals = 0
        self._worked = False

    def read(self, handle: Any) -> list[Answer]:
        """Answers for `SIGNALS`, in order: ratios 0 to 1, rates in bytes per second.

        NO_DATA at the first call, at one that comes too soon, and for a value that makes no sense.
        """
        if self._refusals >= _GIVE_UP_AFTER and not self._worked:
            return ["NOT_SUPPORTED"] * len(SIGNALS)
        try:
            answers = self._read(handle)
        except pynvml.NVMLError as error:
            cause = cause_of(error)
            if cause != "NO_DATA" and cause not in _KEEP_ASKING:
                self._refusals += 1
            return [cause] * len(SIGNALS)
        self._refusals = 0
        self._worked = self._worked or any(not isinstance(answer, str) for answer in answers)
        return answers

    def free(self) -> None:
        """Give the samples back; the next call starts anew."""
        if self._request is None:
            return
        for sample in (self._older, self._newer):
            pynvml.nvmlGpmSampleFree(sample)
        self._older = self._newer = self._newer_at_s = self._request = None

    def _read(self, handle: Any) -> list[Answer]:
        if self._newer_at_s is not None and time.monotonic() - self._newer_at_s < _MIN_WINDOW_S:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_DATA)
        if self._request is None:
            self._allocate()
        pynvml.nvmlGpmSampleGet(handle, self._older)
        self._older, self._newer = self._newer, self._older
        # Once it is taken: on a busy machine that may be long after it was asked for, and the window shorter than it
        # looks is refused as if there were no GPM.
        first, self._newer_at_s = self._newer_at_s is None, time.monotonic()
        if first:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_DATA)
        self._request.sample1, self._request.sample2 = self._older, self._newer
        pynvml.nvmlGpmMetricsGet(self._request)
        # The bytes as they are: taken apart by ctypes, seven metrics cost as much as all other values of a GPU.
        found = _METRIC.iter_unpack(memoryview(self._request).cast("B")[_FIRST_METRIC:_END_OF_METRICS])
        return [_answer(code, value, *shown[2:]) for shown, (code, value) in zip(_METRICS, found, strict=True)]

    def _allocate(self) -> None:
        self._older = pynvml.nvmlGpmSampleAlloc()
        self._newer = pynvml.nvmlGpmSampleAlloc()
        # 19 KB, so made once: NVML's struct has a slot for each metric there is.
        self._request = pynvml.c_nvmlGpmMetricsGet_t()
        self._request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        self._request.numMetrics = len(_METRICS)
        for slot, (_, metric, _, _) in enumerate(_METRICS):
            self._request.metrics[slot].metricId = metric


def _answer(code: int, value: float, per: float, up_to: float) -> Answer:
    if code != pynvml.NVML_SUCCESS:
        return code_name(code)
    return value / per if 0.0 <= value <= up_to else "NO_DATA"  # NaN is outside too
