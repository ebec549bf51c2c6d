"""NVML through nvidia-ml-py: all that the driver says of every GPU here, each value with its own return code.

(The PyPI project is called `nvidia-ml-py`, its module `pynvml`; the PyPI project `pynvml` holds no bindings any more.)
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pynvml

from tidegate.clock import Clock, SystemClock
from tidegate.health.readings import MIDDLE_S, SLOW_S, ListedGpu, Reading, Round, Signal, Status
from tidegate.health.sources import nvml_gpm, nvml_links
from tidegate.health.sources.kmsg import pci_address
from tidegate.health.sources.nvml_session import OtherLibraryError, connect, disconnect
from tidegate.health.sources.nvml_values import (
    HOT,
    MIDDLE,
    OLDER_CALL_HELPS,
    SLOW,
    STATUSES,
    Answer,
    Ask,
    cause_of,
    one,
    unsupported,
)
from tidegate.health.sources.saying import Every
from tidegate.ids import GpuId, NodeId

logger = logging.getLogger(__name__)

_FIRST_RETRY_S = 1.0
_LAST_RETRY_S = 30.0
_OF_PEERS = frozenset({Signal.GPU_NVLINKS, Signal.GPU_NVLINKS_DOWN})
"""Said each time, whatever they are: they are judged by what the other GPUs here have."""
_SLOW_LOOK_S = 0.1
_ASK_AGAIN_S = 3600.0
"""What a GPU does not have may come: rows can't be asked for while it is cut into instances."""


@dataclass(slots=True)
class _Gpu:
    """A GPU that could be opened in this session with the driver."""

    uuid: GpuId
    index: int
    handle: Any
    name: str | None
    pci: str | None
    middle: Every
    activity: nvml_gpm.Activity = field(default_factory=nvml_gpm.Activity)
    links: nvml_links.NvLinks = field(default_factory=nvml_links.NvLinks)
    unsupported: dict[Signal, str] = field(default_factory=dict)
    """Signals that this GPU has told us it does not have, with the cause: not asked again before `_ASK_AGAIN_S`."""
    slow: Every = field(default_factory=lambda: Every(SLOW_S))
    again: Every = field(default_factory=lambda: Every(_ASK_AGAIN_S))
    repeat: Every = field(default_factory=lambda: Every(SLOW_S))
    """When it is said again what it does not have."""

    @property
    def listed(self) -> ListedGpu:
        return ListedGpu(uuid=self.uuid, index=self.index, pci=self.pci)


class NvmlSource:
    """Reads all GPUs. One that fails, fails alone; a driver that isn't there is tried again, at growing rests.

    One library serves a process for its whole life (pynvml keeps its symbols): after a driver upgrade the process must
    be started anew.
    """

    def __init__(
        self, library: str | None, *, node: NodeId, clock: Clock | None = None, middle_every_s: float = MIDDLE_S
    ) -> None:
        """`library`: path of libnvidia-ml.so.1; None = the loader finds it. `middle_every_s`: how often the middle
        ones are asked for, activity among them, which is what was between two such looks."""
        self._library, self._middle_every_s = library, middle_every_s
        self._node = node
        self._clock = clock if clock is not None else SystemClock()
        self._open = False
        self.driver = ""
        """Its version, as the newest session was told; empty before there was one."""
        self._error: str | None = None
        self._retry_at_s = 0.0
        self._rest_s = _FIRST_RETRY_S
        self._gpus: dict[int, _Gpu] = {}
        self._listed: tuple[ListedGpu, ...] = ()
        self._known: set[GpuId] = set()
        self._reopened_for: set[str] = set()
        self._old_temperature_call = False
        self._heat = (
            one(Signal.GPU_TEMPERATURE, self._temperature),
            one(Signal.GPU_MARGIN, pynvml.nvmlDeviceGetMarginTemperature),
        )

    def read(self) -> Round:
        """One look at all GPUs; blocks for as long as the driver does."""
        if not self._open and self._clock.now_s() < self._retry_at_s:
            return Round(gpus=self._listed, readings=(), error=self._error)
        try:
            if not self._open:
                self._connect()
            count = pynvml.nvmlDeviceGetCount()
        except pynvml.NVMLError as error:
            return self._failed(cause_of(error), str(error))
        except OSError as error:
            return self._failed("LIBRARY_NOT_FOUND", str(error))
        except OtherLibraryError as error:
            return self._failed("OTHER_LIBRARY", str(error))
        self._rest_s, self._error = _FIRST_RETRY_S, None
        return self._read_gpus(count)

    def close(self) -> None:
        """End the session with the driver; the next `read` starts a new one."""
        if not self._open:
            return
        self._open = False
        for gpu in self._gpus.values():
            gpu.activity.free()
        self._gpus.clear()
        disconnect()

    def _connect(self) -> None:
        connect(self._library)
        self._open = True
        self.driver = str(pynvml.nvmlSystemGetDriverVersion())
        logger.info("NVML: driver %s answers", self.driver)

    def _failed(self, cause: str, detail: str) -> Round:
        self.close()
        self._error = f"NVML: {cause}: {detail}"
        self._retry_at_s = self._clock.now_s() + self._rest_s
        self._rest_s = min(2 * self._rest_s, _LAST_RETRY_S)
        silent = self._reading(self._node, Signal.NVML_ANSWERS, cause)
        return Round(gpus=self._listed, readings=(silent,), error=self._error)

    def _read_gpus(self, count: int) -> Round:
        before = {gpu.index: gpu for gpu in self._listed}
        unopened = {index: cause for index in range(count) if (cause := self._open_gpu(index)) is not None}
        opened = {gpu.uuid for gpu in self._gpus.values()}
        readings = [
            self._reading(self._node, Signal.NVML_ANSWERS, 1.0),
            self._reading(self._node, Signal.GPU_COUNT, float(count)),
        ]
        listed = []
        for index in range(count):
            if index in unopened:
                gpu = before.get(index)
                if gpu is None or gpu.uuid in opened:  # never read, or NVML has renumbered since
                    gpu = ListedGpu(uuid=GpuId(f"unidentified-{self._node[:12]}-{index}"), index=index)
                readings.append(self._reading(gpu.uuid, Signal.GPU_ANSWERS, unopened[index]))
                listed.append(gpu)
            else:
                here = self._gpus[index]
                readings += self._timed(here)
                known = before.get(index)
                listed.append(known if known is not None and known.uuid == here.uuid else here.listed)
        self._known |= opened
        for uuid in sorted(self._known.difference(gpu.uuid for gpu in listed)):
            readings.append(self._reading(uuid, Signal.GPU_ANSWERS, "GPU_NOT_FOUND"))
        self._listed = tuple(listed)
        self._open_again_once(readings)
        if any(reading.signal is Signal.GPU_NVLINKS for reading in readings):
            readings = self._without_its_peers_links(readings)
        return Round(gpus=self._listed, readings=tuple(readings))

    def _open_gpu(self, index: int) -> str | None:
        """Open and identify a GPU unless it is; the cause if that fails."""
        if index in self._gpus:
            return None
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            uuid = GpuId(pynvml.nvmlDeviceGetUUID(handle))
        except pynvml.NVMLError as error:
            return cause_of(error)
        middle = Every(self._middle_every_s)
        name, pci = _name(handle), _pci(handle)
        self._gpus[index] = _Gpu(uuid=uuid, index=index, handle=handle, name=name, pci=pci, middle=middle)
        return None

    def _timed(self, gpu: _Gpu) -> list[Reading]:
        """One look at the GPU; of a slow one, and else now and then, how long it took (C152)."""
        began_s = time.monotonic()
        readings = self._read_gpu(gpu)
        took_s = time.monotonic() - began_s
        if took_s >= _SLOW_LOOK_S or any(reading.signal is Signal.GPU_UTILIZATION for reading in readings):
            readings.append(self._reading(gpu.uuid, Signal.GPU_READ, took_s))
        return readings

    def _read_gpu(self, gpu: _Gpu) -> list[Reading]:
        now_s = self._clock.now_s()
        if gpu.again.due(now_s):
            gpu.unsupported.clear()
        repeat = gpu.repeat.due(now_s)
        readings = self._ask(gpu, self._heat, repeat=repeat)
        answers = self._reading(gpu.uuid, Signal.GPU_ANSWERS, self._answers(gpu, readings))
        if answers.status is not Status.OK:
            return [answers, *readings]
        readings += self._ask(gpu, HOT, repeat=repeat)
        if gpu.middle.due(now_s):
            readings += self._ask(gpu, (Ask(nvml_gpm.SIGNALS, gpu.activity.read), *MIDDLE), repeat=repeat)
            readings += self._links(gpu, repeat=repeat)
        if gpu.slow.due(now_s):
            readings += self._ask(gpu, SLOW, repeat=True)
        lost = next((reading.cause for reading in readings if reading.status is Status.LOST), None)
        if lost is not None:
            answers = self._reading(gpu.uuid, Signal.GPU_ANSWERS, lost)
        return [answers, *readings]

    def _ask(self, gpu: _Gpu, asks: Iterable[Ask], *, repeat: bool) -> list[Reading]:
        """Readings of all that these ask for; `repeat`: also of what is known not to be there."""
        readings: list[Reading] = []
        node, uuid, now_s = self._node, gpu.uuid, self._clock.now_s
        gone: str | None = None
        for ask in asks:
            if gone is not None:
                # A lost GPU is not asked further: each call may take long, and the answer is known.
                answers: Iterable[Answer] = [gone] * len(ask.signals)
            elif all(signal in gpu.unsupported for signal in ask.signals):
                if not repeat:
                    continue
                answers = [gpu.unsupported[signal] for signal in ask.signals]
            else:
                try:
                    answers = ask.call(gpu.handle)
                except pynvml.NVMLError as error:
                    answers = [cause_of(error)] * len(ask.signals)
            at_s = now_s()
            for signal, answer in zip(ask.signals, answers, strict=True):
                if isinstance(answer, str):
                    if unsupported(answer):
                        if signal in gpu.unsupported and not repeat:
                            continue
                        gpu.unsupported[signal] = answer
                    elif STATUSES.get(answer) is Status.LOST:
                        gone = answer
                    readings.append(self._reading(uuid, signal, answer))
                else:
                    readings.append(Reading(at_s, node, uuid, signal, float(answer), Status.OK))
        return readings

    def _links(self, gpu: _Gpu, *, repeat: bool) -> list[Reading]:
        try:
            answers, detail = gpu.links.read(gpu.handle)
        except pynvml.NVMLError as error:
            answers, detail = dict.fromkeys(nvml_links.SIGNALS, cause_of(error)), None
        readings = []
        for signal, answer in answers.items():
            if unsupported(answer) and signal not in _OF_PEERS:
                if signal in gpu.unsupported and not repeat:
                    continue
                gpu.unsupported[signal] = str(answer)
            shown = detail if signal is Signal.GPU_NVLINKS_DOWN else None
            readings.append(self._reading(gpu.uuid, signal, answer, shown))
        return readings

    def _without_its_peers_links(self, readings: list[Reading]) -> list[Reading]:
        """A GPU that shows no NVLink while others of its model here have some has lost them all (C137)."""
        names = {gpu.uuid: gpu.name for gpu in self._gpus.values()}
        most: dict[str | None, float] = {}
        for reading in readings:
            if reading.signal is Signal.GPU_NVLINKS and reading.value is not None:
                name = names.get(GpuId(reading.subject))
                most[name] = max(most.get(name, 0.0), reading.value)
        bare = {
            reading.subject: most.get(names.get(GpuId(reading.subject)), 0.0)
            for reading in readings
            if reading.signal is Signal.GPU_NVLINKS
            and (reading.value == 0 or reading.status is Status.UNSUPPORTED)
            and names.get(GpuId(reading.subject)) is not None
        }
        return [
            self._reading(reading.subject, reading.signal, links, f"no link at all; its peers have {links:g}")
            if reading.signal is Signal.GPU_NVLINKS_DOWN and (links := bare.get(reading.subject, 0.0)) > 0
            else reading
            for reading in readings
        ]

    def _answers(self, gpu: _Gpu, readings: list[Reading]) -> Answer:
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
            return cause_of(error)
        return 1.0

    def _temperature(self, handle: Any) -> int:
        """Core temperature in °C."""
        if not self._old_temperature_call:
            try:
                return int(pynvml.nvmlDeviceGetTemperatureV(handle, pynvml.NVML_TEMPERATURE_GPU))
            except pynvml.NVMLError as error:
                if cause_of(error) not in OLDER_CALL_HELPS:
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

    def _reading(self, subject: str, signal: Signal, answer: Answer, detail: str | None = None) -> Reading:
        """A reading of a value, or of the cause why there is none."""
        known = not isinstance(answer, str)
        return Reading(
            at_s=self._clock.now_s(),
            node=self._node,
            subject=subject,
            signal=signal,
            value=float(answer) if known else None,
            status=Status.OK if known else STATUSES.get(str(answer), Status.STALE),
            cause=None if known else str(answer),
            detail=detail,
        )


def _name(handle: Any) -> str | None:
    try:
        return str(pynvml.nvmlDeviceGetName(handle))
    except pynvml.NVMLError:
        return None  # only its peers' links are compared by it


def _pci(handle: Any) -> str | None:
    try:
        return pci_address(pynvml.nvmlDeviceGetPciInfo(handle).busId)
    except pynvml.NVMLError as error:
        logger.info("NVML: a GPU's PCI address: %s; kernel log lines on it stay under their address", cause_of(error))
        return None
