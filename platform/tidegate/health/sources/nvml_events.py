"""XIDs as NVML tells them: a call that waits for the next one. Only those since we registered are told."""

from __future__ import annotations

import ctypes
import logging
from typing import Any

import pynvml

from tidegate.clock import Clock, SystemClock
from tidegate.health.readings import Reading, Round, Signal
from tidegate.health.sources.nvml_session import OtherLibraryError, connect, disconnect
from tidegate.health.sources.nvml_values import cause_of
from tidegate.health.sources.saying import Voice
from tidegate.ids import NodeId

logger = logging.getLogger(__name__)

WAIT_S = 5.0
"""How long one look waits for an event."""
RETRY_S = 30.0
"""After a failure: it is `NvmlSource` that says what is wrong with the driver, and when it is back."""


class NvmlEventSource:
    """Waits for XIDs of all GPUs. Meant for a thread of its own: each look blocks for `wait_s`.

    The kernel log tells the same ones, with more words and of GPUs that no longer answer; where it can't be read, these
    are all there is.
    """

    def __init__(
        self, library: str | None, *, node: NodeId, clock: Clock | None = None, wait_s: float = WAIT_S
    ) -> None:
        self._library = library
        self._clock = clock if clock is not None else SystemClock()
        self._voice = Voice(node, self._clock)
        self._wait_ms = round(wait_s * 1000)
        self._set: Any = None
        self._uuids: dict[int, str] = {}
        """By the handle's address."""
        self._retry_at_s = 0.0

    def read(self) -> Round:
        """Wait for the next XID and take those behind it; no readings where all is quiet."""
        if self._set is None and self._clock.now_s() < self._retry_at_s:
            return Round(readings=())
        try:
            if self._set is None:
                self._open()
            return Round(readings=tuple(self._events()))
        except pynvml.NVMLError as error:
            cause = cause_of(error)
        except OSError:
            cause = "LIBRARY_NOT_FOUND"
        except OtherLibraryError:
            cause = "OTHER_LIBRARY"
        self.close()
        self._retry_at_s = self._clock.now_s() + RETRY_S
        return Round(readings=(), error=f"NVML events: {cause}")

    def close(self) -> None:
        if self._set is None:
            return
        try:
            pynvml.nvmlEventSetFree(self._set)
        except pynvml.NVMLError as error:
            logger.info("NVML events: free says %s", cause_of(error))
        self._set = None
        disconnect()

    def _open(self) -> None:
        connect(self._library)
        try:
            self._set = pynvml.nvmlEventSetCreate()
        except pynvml.NVMLError:
            disconnect()
            raise
        self._uuids = {}
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                uuid = pynvml.nvmlDeviceGetUUID(handle)
                wanted = pynvml.nvmlDeviceGetSupportedEventTypes(handle) & pynvml.nvmlEventTypeXidCriticalError
                if wanted:
                    pynvml.nvmlDeviceRegisterEvents(handle, wanted, self._set)
                    self._uuids[_address(handle)] = uuid
            except pynvml.NVMLError as error:
                logger.info("NVML events: GPU %d can't be watched: %s", index, cause_of(error))

    def _events(self) -> list[Reading]:
        events: list[Reading] = []
        wait_ms = self._wait_ms
        while True:
            try:
                event = pynvml.nvmlEventSetWait_v2(self._set, wait_ms)
            except pynvml.NVMLError as error:
                if error.value == pynvml.NVML_ERROR_TIMEOUT:
                    return events  # the normal quiet answer
                if events:
                    return events  # it says so again at the next look, and what has been told must not be lost
                raise
            wait_ms = 0
            uuid = self._uuids.get(_address(event.device))
            if uuid is not None and event.eventType == pynvml.nvmlEventTypeXidCriticalError:
                events.append(self._voice.value(uuid, Signal.GPU_XID, float(event.eventData)))


def _address(handle: Any) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0
