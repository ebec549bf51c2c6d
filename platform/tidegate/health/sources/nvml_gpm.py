"""Tensor activity by NVML's GPM: two samples and what happened between them (Hopper and newer)."""

from __future__ import annotations

import time
from typing import Any

import pynvml

_MIN_WINDOW_S = 0.1
"""Samples closer than this are refused or mean nothing (`nvml.h`, nvmlGpmMetricsGet)."""


class TensorActivity:
    """One GPU's tensor activity since it was last asked. There is no sleep: the window is the caller's own period.

    Not for several threads at once.
    """

    def __init__(self) -> None:
        self._older: Any = None
        self._newer: Any = None
        self._newer_at_s: float | None = None
        self._request: Any = None

    def ratio(self, handle: Any) -> float:
        """Share of the time since the last call in which tensor cores worked, 0 to 1.

        Raises:
            pynvml.NVMLError: NO_DATA at the first call, at one that comes too soon, and where the value makes no sense;
                else NVML's own.
        """
        now_s = time.monotonic()
        if self._newer_at_s is not None and now_s - self._newer_at_s < _MIN_WINDOW_S:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_DATA)
        if self._request is None:
            self._allocate()
        pynvml.nvmlGpmSampleGet(handle, self._older)
        self._older, self._newer = self._newer, self._older
        first, self._newer_at_s = self._newer_at_s is None, now_s
        if first:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_DATA)
        self._request.sample1, self._request.sample2 = self._older, self._newer
        metric = pynvml.nvmlGpmMetricsGet(self._request).metrics[0]
        if metric.nvmlReturn != pynvml.NVML_SUCCESS:
            raise pynvml.NVMLError(metric.nvmlReturn)
        percent = float(metric.value)
        if not 0.0 <= percent <= 100.0:  # also NaN
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_DATA)
        return percent / 100.0

    def free(self) -> None:
        """Give the samples back; the next call starts anew."""
        if self._request is None:
            return
        for sample in (self._older, self._newer):
            pynvml.nvmlGpmSampleFree(sample)
        self._older = self._newer = self._newer_at_s = self._request = None

    def _allocate(self) -> None:
        self._older = pynvml.nvmlGpmSampleAlloc()
        self._newer = pynvml.nvmlGpmSampleAlloc()
        # 19 KB, so made once: NVML's struct has a slot for each metric there is.
        self._request = pynvml.c_nvmlGpmMetricsGet_t()
        self._request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        self._request.numMetrics = 1
        self._request.metrics[0].metricId = pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL
