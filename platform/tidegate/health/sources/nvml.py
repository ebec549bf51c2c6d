"""NVML through nvidia-ml-py: temperature, thermal margin, tensor activity, memory and processes of every GPU here.

(The PyPI project is called `nvidia-ml-py`, its module `pynvml`; the PyPI project `pynvml` holds no bindings any more.)
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pynvml

from tidegate.clock import Clock, SystemClock
from tidegate.health.readings import ListedGpu, Reading, Round, Signal, Status
from tidegate.health.sources.nvml_gpm import TensorActivity
from tidegate.ids import GpuId, NodeId

logger = logging.getLogger(__name__)

_PREFIX = "NVML_ERROR_"
CAUSES = {getattr(pynvml, name): name.removeprefix(_PREFIX) for name in dir(pynvml) if name.startswith(_PREFIX)}
"""NVML's return codes by name, e.g. 15 -> GPU_IS_LOST."""

STATUSES = {
    "NOT_SUPPORTED": Status.UNSUPPORTED,
    "FUNCTION_NOT_FOUND": Status.UNSUPPORTED,
    "ARGUMENT_VERSION_MISMATCH": Status.UNSUPPORTED,
    "DEPRECATED": Status.UNSUPPORTED,
    "NO_PERMISSION": Status.NO_PERMISSION,
    "TIMEOUT": Status.TIMEOUT,
    "GPU_IS_LOST": Status.LOST,
    "RESET_REQUIRED": Status.LOST,
    "GPU_NOT_FOUND": Status.LOST,
    "IRQ_ISSUE": Status.LOST,
}
"""What a code says about the value; a code that isn't named (NO_DATA, NOT_READY, UNKNOWN, …): no value this time."""

_OLDER_CALL_HELPS = ("FUNCTION_NOT_FOUND", "ARGUMENT_VERSION_MISMATCH", "DEPRECATED")
_FIRST_RETRY_S = 1.0
_LAST_RETRY_S = 30.0


@dataclass(slots=True)
class _Gpu:
    """A GPU that could be opened in this session with the driver."""

    uuid: GpuId
    index: int
    handle: Any
    tensor: TensorActivity = field(default_factory=TensorActivity)
    unsupported: dict[Signal, str] = field(default_factory=dict)
    """Signals that this GPU has told us it does not have, with the cause: not asked again."""


class NvmlSource:
    """Reads all GPUs. One that fails, fails alone; a driver that isn't there is tried again, at growing rests.

    One library serves a process for its whole life (pynvml keeps its symbols): after a driver upgrade the process must
    be started anew.
    """

    def __init__(self, library: str | None, *, node: NodeId, clock: Clock | None = None) -> None:
        """`library`: path of libnvidia-ml.so.1; None = the loader finds it."""
        self._library = library
        self._node = node
        self._clock = clock if clock is not None else SystemClock()
        self._open = False
        self._error: str | None = None
        self._retry_at_s = 0.0
        self._rest_s = _FIRST_RETRY_S
        self._gpus: dict[int, _Gpu] = {}
        self._listed: tuple[ListedGpu, ...] = ()
        self._known: set[GpuId] = set()
        self._reopened_for: set[str] = set()
        self._old_temperature_call = False

    def read(self) -> Round:
        """One look at all GPUs; blocks for as long as the driver does."""
        if not self._open and self._clock.now_s() < self._retry_at_s:
            return Round(gpus=self._listed, readings=(), error=self._error)
        try:
            if not self._open:
                self._connect()
            count = pynvml.nvmlDeviceGetCount()
        except pynvml.NVMLError as error:
            return self._failed(_cause(error), str(error))
        except OSError as error:
            return self._failed("LIBRARY_NOT_FOUND", str(error))
        except _OtherLibraryError as error:
            return self._failed("OTHER_LIBRARY", str(error))
        self._rest_s, self._error = _FIRST_RETRY_S, None
        return self._read_gpus(count)

    def close(self) -> None:
        """End the session with the driver; the next `read` starts a new one."""
        if not self._open:
            return
        self._open = False
        for gpu in self._gpus.values():
            gpu.tensor.free()
        self._gpus.clear()
        try:
            pynvml.nvmlShutdown()
        except pynvml.NVMLError as error:
            # The driver is gone already; there is nothing left to close.
            logger.info("NVML: shutdown says %s", _cause(error))

    def _connect(self) -> None:
        ours = None
        if self._library is not None:
            # pynvml asks the loader for "libnvidia-ml.so.1": the loader gives it the one that is mapped by that name.
            ours = ctypes.CDLL(self._library, mode=ctypes.RTLD_GLOBAL)
        pynvml.nvmlInit()
        self._open = True
        if ours is not None and pynvml.nvmlLib._handle != ours._handle:
            raise _OtherLibraryError(f"this process had loaded another libnvidia-ml.so.1 before {self._library}")
        logger.info("NVML: driver %s answers", pynvml.nvmlSystemGetDriverVersion())

    def _failed(self, cause: str, detail: str) -> Round:
        self.close()
        self._error = f"NVML: {cause}: {detail}"
        self._retry_at_s = self._clock.now_s() + self._rest_s
        self._rest_s = min(2 * self._rest_s, _LAST_RETRY_S)
        silent = self._reading(self._node, Signal.NVML_ANSWERS, cause)
        return Round(gpus=self._listed, readings=(silent,), error=self._error)

    def _read_gpus(self, count: int) -> Round:
        unopened = {index: cause for index in range(count) if (cause := self._open_gpu(index)) is not None}
        opened = {gpu.uuid for gpu in self._gpus.values()}
        before = {gpu.index: gpu.uuid for gpu in self._listed}
        readings = [self._reading(self._node, Signal.NVML_ANSWERS, 1.0)]
        listed = []
        for index in range(count):
            if index in unopened:
                uuid = before.get(index)
                if uuid is None or uuid in opened:  # never read, or NVML has renumbered since
                    uuid = GpuId(f"unidentified-{self._node[:12]}-{index}")
                readings.append(self._reading(uuid, Signal.GPU_ANSWERS, unopened[index]))
            else:
                uuid = self._gpus[index].uuid
                readings += self._read_gpu(self._gpus[index])
            listed.append(ListedGpu(uuid=uuid, index=index))
        self._known |= opened
        for uuid in sorted(self._known.difference(gpu.uuid for gpu in listed)):
            readings.append(self._reading(uuid, Signal.GPU_ANSWERS, "GPU_NOT_FOUND"))
        self._listed = tuple(listed)
        self._open_again_once(readings)
        return Round(gpus=self._listed, readings=tuple(readings))

    def _open_gpu(self, index: int) -> str | None:
        """Open and identify a GPU unless it is; the cause if that fails."""
        if index in self._gpus:
            return None
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            uuid = GpuId(pynvml.nvmlDeviceGetUUID(handle))
        except pynvml.NVMLError as error:
            return _cause(error)
        self._gpus[index] = _Gpu(uuid=uuid, index=index, handle=handle)
        return None

    def _read_gpu(self, gpu: _Gpu) -> list[Reading]:
        asks: tuple[tuple[Signal, Callable[[Any], float]], ...] = (
            (Signal.GPU_TEMPERATURE, self._temperature),
            (Signal.GPU_MARGIN, pynvml.nvmlDeviceGetMarginTemperature),
            (Signal.GPU_TENSOR_ACTIVE, gpu.tensor.ratio),
        )
        readings: list[Reading] = []
        for signal, ask in asks:
            gone = next((reading.cause for reading in readings if reading.status is Status.LOST), None)
            # A lost GPU is not asked further: each call may take long, and the answer is known.
            readings.append(self._ask(gpu, signal, ask) if gone is None else self._reading(gpu.uuid, signal, gone))
        answers = self._reading(gpu.uuid, Signal.GPU_ANSWERS, self._answers(gpu, readings))
        if answers.status is Status.OK:
            readings.append(self._ask(gpu, Signal.GPU_MEMORY_USED, _memory_used))
            readings.append(self._ask(gpu, Signal.GPU_PROCESSES, _processes))
        return [answers, *readings]

    def _ask(self, gpu: _Gpu, signal: Signal, ask: Callable[[Any], float]) -> Reading:
        if signal in gpu.unsupported:
            return self._reading(gpu.uuid, signal, gpu.unsupported[signal])
        try:
            return self._reading(gpu.uuid, signal, float(ask(gpu.handle)))
        except pynvml.NVMLError as error:
            cause = _cause(error)
        if STATUSES.get(cause) is Status.UNSUPPORTED:
            gpu.unsupported[signal] = cause
        return self._reading(gpu.uuid, signal, cause)

    def _answers(self, gpu: _Gpu, readings: list[Reading]) -> float | str:
        """1.0, or why this GPU as a whole does not answer: it says that it is lost, or not one of its values came."""
        lost = [reading.cause for reading in readings if reading.status is Status.LOST]
        if lost and lost[0] is not None:
            return lost[0]
        if any(reading.status is Status.OK for reading in readings):
            return 1.0
        try:
            # It may just have none of these values; any GPU can say its name.
            pynvml.nvmlDeviceGetUUID(gpu.handle)
        except pynvml.NVMLError as error:
            return _cause(error)
        return 1.0

    def _temperature(self, handle: Any) -> int:
        """Core temperature in °C."""
        if not self._old_temperature_call:
            try:
                return int(pynvml.nvmlDeviceGetTemperatureV(handle, pynvml.NVML_TEMPERATURE_GPU))
            except pynvml.NVMLError as error:
                if _cause(error) not in _OLDER_CALL_HELPS:
                    raise
                self._old_temperature_call = True
        return int(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU))

    def _open_again_once(self, readings: list[Reading]) -> None:
        """UNKNOWN often means that a container lost its right to the device: a new session may have it again."""
        answers = [reading for reading in readings if reading.signal is Signal.GPU_ANSWERS]
        unknown = {reading.subject for reading in answers if reading.cause == "UNKNOWN"}
        first_time = unknown - self._reopened_for
        self._reopened_for = unknown
        if first_time:
            self.close()

    def _reading(self, subject: str, signal: Signal, value: float | str) -> Reading:
        """A reading of a value, or of the cause why there is none."""
        return Reading(
            at_s=self._clock.now_s(),
            node=self._node,
            subject=subject,
            signal=signal,
            value=None if isinstance(value, str) else value,
            status=STATUSES.get(value, Status.STALE) if isinstance(value, str) else Status.OK,
            cause=value if isinstance(value, str) else None,
        )


class _OtherLibraryError(Exception):
    """pynvml works on a library that is not the one we were told to use."""


def _memory_used(handle: Any) -> int:
    """Bytes, without what the driver keeps for itself: only the second layout tells the two apart."""
    return int(pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used)


def _processes(handle: Any) -> int:
    return len(pynvml.nvmlDeviceGetComputeRunningProcesses(handle))


def _cause(error: pynvml.NVMLError) -> str:
    return CAUSES.get(error.value, f"CODE_{error.value}")
