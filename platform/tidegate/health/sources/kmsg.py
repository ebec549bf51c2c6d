"""The kernel log: XIDs and the network cards' own complaints, as they are written.

Followed: /dev/kmsg, or a plain file or pipe that something writes the kernel's lines to. What it says from before the
agent came is read once, under its own time: an agent that was away for a moment misses nothing, and what is older than
a minute is told and not acted on. NVML tells XIDs too, but only of a GPU that still answers, and without the text that
says whether an NVLink XID is fatal.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from stat import S_ISCHR, S_ISREG

from tidegate.clock import Clock, SystemClock
from tidegate.health.readings import Reading, Round, Signal, Status
from tidegate.health.sources.saying import Voice, cause_of
from tidegate.ids import NodeId

KMSG = Path("/dev/kmsg")
MAX_RECORDS = 2000
"""Read at one look; a log that is being flooded is read on at the next."""
_RECORD_BYTES = 8192
"""The longest record that the kernel gives (CONSOLE_EXT_LOG_MAX)."""
_PAST_BYTES = 2**20
"""Of a plain file, so much from before its end is looked through."""
_TRUST_S = 10.0
"""A line's own time counts if it is this close to the moment of reading it. The kernel's log clock drifts (seconds a
month), a copied line has an old date, and what has just been written has just happened."""

_KMSG_HEAD = re.compile(r"\d+,\d+,(\d+),[^;]*;")
_DMESG_HEAD = re.compile(r"\s*\[\s*(\d+\.\d+)\]\s?")
_CTIME_HEAD = re.compile(r"\s*\[(\w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d \d{4})\]\s?")
_ISO_HEAD = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[.,]\d+(?:[+-]\d\d:?\d\d|Z)?)\s+")

_ADDRESS = r"([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}(?:\.[0-9A-Fa-f])?)"
_XID = re.compile(rf"NVRM: Xid \((?:PCI:)?{_ADDRESS}\): (\d+)(?:,\s*(.*))?")
_FELL_WHO = re.compile(rf"NVRM: The NVIDIA GPU {_ADDRESS}")
_FELL = re.compile(r"fallen off the bus and is not responding to commands")
OFF_THE_BUS = 79.0

_NIC = re.compile(rf"mlx[45]_core {_ADDRESS}")
_NIC_LINES: Mapping[Signal, re.Pattern[str]] = {
    Signal.NIC_HOT: re.compile("High Temperature", re.IGNORECASE),
    Signal.NIC_UNDERPOWERED: re.compile("insufficient power", re.IGNORECASE),
    Signal.NIC_UNHEALTHY: re.compile("device's health compromised - reached miss count", re.IGNORECASE),
    Signal.NIC_COMMAND_LEAK: re.compile("timeout. Will cause a leak of a command resource", re.IGNORECASE),
}


def pci_address(text: str) -> str:
    """A PCI address as readings have it, whoever wrote it: `00000000:5D:00.0` and `0000:5d:00` are `0000:5d:00`."""
    domain, bus, device = text.split(".")[0].lower().split(":")
    return f"{domain[-4:]}:{bus}:{device}"


def dated(line: str, boot_at_s: float) -> tuple[float | None, str]:
    """When a line says that it was written, and what it says (C192).

    Known are /dev/kmsg's own records, dmesg's seconds since boot, `dmesg -T` and `journalctl -o short-iso-precise`.
    A time without a zone is in the machine's zone.
    """
    if found := _KMSG_HEAD.match(line):
        return boot_at_s + int(found[1]) * 1e-6, line[found.end() :]
    if found := _DMESG_HEAD.match(line):
        return boot_at_s + float(found[1]), line[found.end() :]
    if found := _CTIME_HEAD.match(line):
        return datetime.strptime(found[1], "%a %b %d %H:%M:%S %Y").timestamp(), line[found.end() :]
    if found := _ISO_HEAD.match(line):
        return datetime.fromisoformat(found[1].replace(",", ".")).timestamp(), line[found.end() :]
    return None, line


def _boot_at_s() -> float:
    return time.time() - time.clock_gettime(time.CLOCK_MONOTONIC)


class KmsgSource:
    """Follows one kernel log. Readings are events, dated; their subject is the PCI address, "pci:0000:5d:00"."""

    def __init__(
        self,
        path: Path = KMSG,
        *,
        node: NodeId,
        clock: Clock | None = None,
        boot_at_s: Callable[[], float] = _boot_at_s,
    ) -> None:
        self._path = path
        self._clock = clock if clock is not None else SystemClock()
        self._voice = Voice(node, self._clock)
        self._boot_at_s = boot_at_s
        self._file: int | None = None
        self._opened_before = False
        self._in_past = False
        """What is read was there before we came."""
        self._of_this_boot = True
        """So that seconds since boot are this boot's; a plain file may hold those of others."""
        self._half = b""
        self._reached_end = False
        self._falling: str | None = None
        """The GPU named by the first line of three, of which the third says that it fell off the bus."""

    def read(self) -> Round:
        """What has been written since the last look."""
        answers = self._voice.value(self._voice.node, Signal.KMSG_ANSWERS, 1.0)
        try:
            lines = self._new_lines()
        except OSError as error:
            self.close()
            return self._failed(error)
        events = [event for line in lines for event in self._events(line)]
        if self._reached_end:
            self._in_past = False
        return Round(readings=(answers, *events))

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file, self._half = None, b""

    def _failed(self, error: OSError) -> Round:
        status = Status.STALE
        if isinstance(error, PermissionError):
            status = Status.NO_PERMISSION
        elif isinstance(error, FileNotFoundError) and not self._opened_before:
            status = Status.UNSUPPORTED  # a container that has no kernel log
        cause = cause_of(error)
        answers = self._voice.missing(self._voice.node, Signal.KMSG_ANSWERS, status, cause)
        return Round(readings=(answers,), error=f"kernel log: {self._path}: {cause}")

    def _new_lines(self) -> list[str]:
        if self._file is None:
            self._file = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            mode = os.fstat(self._file).st_mode
            if S_ISREG(mode) and self._opened_before:
                pass  # rotated: the new file is new from its beginning
            elif S_ISREG(mode) or S_ISCHR(mode):
                self._begin_in_the_past(self._file, mode)
            self._opened_before = True
        self._follow_rotation()
        text = self._half
        for _ in range(MAX_RECORDS):
            try:
                chunk = os.read(self._file, _RECORD_BYTES)
            except BlockingIOError:
                self._reached_end = True
                break
            except BrokenPipeError:
                continue  # kmsg: the kernel has overwritten what we had not read; the next read is the oldest there is
            if not chunk:
                self._reached_end = True
                break
            text += chunk
        *whole, self._half = text.split(b"\n")
        # One record may hold several lines, written as \x0a; lines that begin with a space are a record's properties.
        records = (line.decode("utf-8", "replace") for line in whole if not line.startswith(b" SUBSYSTEM="))
        return [line for record in records for line in record.split("\\x0a")]

    def _begin_in_the_past(self, file: int, mode: int) -> None:
        """/dev/kmsg begins with the oldest that the kernel still has of this boot."""
        self._in_past, self._of_this_boot = True, S_ISCHR(mode)
        if S_ISREG(mode):
            os.lseek(file, max(0, os.fstat(file).st_size - _PAST_BYTES), os.SEEK_SET)

    def _follow_rotation(self) -> None:
        """A plain log that was cut or replaced is read on from the new one's beginning."""
        assert self._file is not None
        here = os.fstat(self._file)
        if not S_ISREG(here.st_mode):
            return
        if here.st_size < os.lseek(self._file, 0, os.SEEK_CUR):
            os.lseek(self._file, 0, os.SEEK_SET)
        elif os.stat(self._path).st_ino != here.st_ino and here.st_size == os.lseek(self._file, 0, os.SEEK_CUR):
            os.close(self._file)
            self._file, self._half = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), b""

    def _knows_date(self, line: str) -> bool:
        """Not of a plain file's seconds since boot: since which one?"""
        return self._of_this_boot or not (_KMSG_HEAD.match(line) or _DMESG_HEAD.match(line))

    def _events(self, line: str) -> list[Reading]:
        if "NVRM" not in line and "mlx" not in line:
            return []
        written_s, text = dated(line, self._boot_at_s())
        now_s = self._clock.now_s()
        if self._in_past and (written_s is None or written_s > now_s or not self._knows_date(line)):
            return []  # it can be of any time
        at_s = written_s if self._in_past or (written_s is not None and abs(written_s - now_s) <= _TRUST_S) else now_s
        assert at_s is not None
        if found := _XID.search(text):
            subject = f"pci:{pci_address(found[1])}"
            return [self._voice.value(subject, Signal.GPU_XID, float(found[2]), detail=found[3] or None, at_s=at_s)]
        if found := _FELL_WHO.search(text):
            self._falling = pci_address(found[1])
        if self._falling is not None and _FELL.search(text):
            subject, self._falling = f"pci:{self._falling}", None
            detail = "fallen off the bus, without an XID"
            return [self._voice.value(subject, Signal.GPU_XID, OFF_THE_BUS, detail=detail, at_s=at_s)]
        if found := _NIC.search(text):
            subject = f"pci:{pci_address(found[1])}"
            return [
                self._voice.value(subject, signal, 1.0, detail=text.strip()[:200], at_s=at_s)
                for signal, pattern in _NIC_LINES.items()
                if pattern.search(text)
            ]
        return []
