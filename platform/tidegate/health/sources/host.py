"""The node itself: disks, memory, /dev/shm, and how far off its clock is."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from tidegate.clock import Clock, SystemClock
from tidegate.health.readings import Reading, Round, Signal, Status
from tidegate.health.sources.saying import Voice, cause_of
from tidegate.ids import NodeId

SHM = Path("/dev/shm")
PROC = Path("/proc")
_KIB = 1024
_STA_UNSYNC = 0x0040
_STA_NANO = 0x2000


class UnsynchronisedError(Exception):
    """Nothing disciplines this machine's clock."""


class HostSource:
    """One look at the node. Files and file systems that can't be asked are missing one by one, never all at once."""

    def __init__(
        self,
        *,
        node: NodeId,
        disks: Iterable[Path] = (),
        shm: Path = SHM,
        proc: Path = PROC,
        clock_offset_s: Callable[[], float] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`disks`: any path on each file system that matters; `clock_offset_s`: see `kernel_clock_offset_s`."""
        self._voice = Voice(node, clock if clock is not None else SystemClock())
        self._disks = tuple(dict.fromkeys(disks))
        self._shm, self._proc = shm, proc
        self._clock_offset_s = clock_offset_s if clock_offset_s is not None else kernel_clock_offset_s

    def read(self) -> Round:
        readings = [self._voice.value(self._voice.node, Signal.HOST_ANSWERS, 1.0)]
        for disk in self._disks:
            readings += self._disk(disk)
        return Round(readings=(*readings, *self._memory(), *self._shared_memory(), self._offset()))

    def _disk(self, path: Path) -> list[Reading]:
        subject = f"disk:{path}"
        try:
            found = os.statvfs(path)
        except OSError as error:
            return [self._refused(subject, Signal.HOST_DISK_FREE, error)]
        free, size = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
        readings = [
            self._voice.value(subject, Signal.HOST_DISK_FREE, float(free)),
            self._voice.value(subject, Signal.HOST_DISK_WRITABLE, 0.0 if found.f_flag & os.ST_RDONLY else 1.0),
        ]
        if size:
            readings.append(self._voice.value(subject, Signal.HOST_DISK_FREE_RATIO, free / size))
        return readings

    def _memory(self) -> list[Reading]:
        node, voice = self._voice.node, self._voice
        readings = []
        try:
            memory = _numbers(self._proc / "meminfo")
            available, total = memory["MemAvailable"] * _KIB, memory["MemTotal"] * _KIB
            readings.append(voice.value(node, Signal.HOST_MEMORY_AVAILABLE, available))
            readings.append(voice.value(node, Signal.HOST_MEMORY_AVAILABLE_RATIO, available / total))
        except OSError as error:
            readings.append(self._refused(node, Signal.HOST_MEMORY_AVAILABLE, error))
        except (KeyError, ZeroDivisionError):
            readings.append(voice.missing(node, Signal.HOST_MEMORY_AVAILABLE, Status.STALE, "NOT_IN_MEMINFO"))
        try:
            readings.append(voice.value(node, Signal.HOST_OOM_KILLS, _numbers(self._proc / "vmstat")["oom_kill"]))
        except OSError as error:
            readings.append(self._refused(node, Signal.HOST_OOM_KILLS, error))
        except KeyError:
            readings.append(voice.missing(node, Signal.HOST_OOM_KILLS, Status.UNSUPPORTED, "NOT_IN_VMSTAT"))
        return readings

    def _shared_memory(self) -> list[Reading]:
        node = self._voice.node
        try:
            found = os.statvfs(self._shm)
        except OSError as error:
            return [self._refused(node, Signal.HOST_SHM_FREE, error)]
        return [
            self._voice.value(node, Signal.HOST_SHM_FREE, float(found.f_bavail * found.f_frsize)),
            self._voice.value(node, Signal.HOST_SHM_SIZE, float(found.f_blocks * found.f_frsize)),
        ]

    def _offset(self) -> Reading:
        node, signal = self._voice.node, Signal.HOST_CLOCK_OFFSET
        try:
            return self._voice.value(node, signal, self._clock_offset_s())
        except UnsynchronisedError:
            return self._voice.missing(node, signal, Status.STALE, "UNSYNCHRONISED")
        except OSError as error:
            return self._voice.missing(node, signal, Status.UNSUPPORTED, cause_of(error))

    def _refused(self, subject: str, signal: Signal, error: OSError) -> Reading:
        status = Status.NO_PERMISSION if isinstance(error, PermissionError) else Status.STALE
        return self._voice.missing(subject, signal, status, cause_of(error))


def _numbers(path: Path) -> dict[str, int]:
    """`MemTotal:  123 kB` or `oom_kill 1` lines, by name."""
    words = (line.split() for line in path.read_text(encoding="ascii").splitlines())
    return {found[0].rstrip(":"): int(found[1]) for found in words if len(found) > 1 and found[1].isdigit()}


class _Timex(ctypes.Structure):
    """`struct timex` of Linux (adjtimex(2)), 64 bits."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("constant", ctypes.c_long),
        ("precision", ctypes.c_long),
        ("tolerance", ctypes.c_long),
        ("time", ctypes.c_long * 2),
        ("tick", ctypes.c_long),
        ("ppsfreq", ctypes.c_long),
        ("jitter", ctypes.c_long),
        ("shift", ctypes.c_int),
        ("stabil", ctypes.c_long),
        ("jitcnt", ctypes.c_long),
        ("calcnt", ctypes.c_long),
        ("errcnt", ctypes.c_long),
        ("stbcnt", ctypes.c_long),
        ("tai", ctypes.c_int),
        ("reserved", ctypes.c_int * 11),
    )


def kernel_clock_offset_s() -> float:
    """What is left to correct by the kernel's clock discipline, seconds, signed. No network is asked.

    Raises:
        UnsynchronisedError: no time service disciplines the clock.
        OSError: the kernel doesn't say (some sandboxes).
    """
    timex = _Timex()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.adjtimex(ctypes.byref(timex)) < 0:
        raise OSError(ctypes.get_errno(), "adjtimex")
    if timex.status & _STA_UNSYNC:
        raise UnsynchronisedError()
    return float(timex.offset) * (1e-9 if timex.status & _STA_NANO else 1e-6)
