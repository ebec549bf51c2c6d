"""InfiniBand and RoCE ports as the kernel shows them: /sys/class/infiniband/DEVICE/ports/N.

Counters are given raw; where they stick is `CEILINGS` in readings.py. What the files mean stands in Linux'
Documentation/ABI/stable/sysfs-class-infiniband.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tidegate.clock import Clock, SystemClock
from tidegate.health.readings import MIDDLE_S, SLOW_S, Reading, Round, Signal, Status
from tidegate.health.sources.open_files import OpenFiles
from tidegate.health.sources.saying import Every, Voice, cause_of
from tidegate.ids import NodeId

logger = logging.getLogger(__name__)

ROOT = Path("/sys/class/infiniband")
_File = tuple[str, str]
"""A counter's folder in its port's, and its name."""
_WORD_BYTES = 4
"""port_rcv_data and port_xmit_data count words of four bytes (C134)."""
_TRAFFIC: Mapping[_File, Signal] = {
    ("counters", "port_rcv_data"): Signal.IB_RECEIVED,
    ("counters", "port_xmit_data"): Signal.IB_SENT,
}
_BOTH_LAYERS: Mapping[_File, Signal] = {
    ("counters", "link_downed"): Signal.IB_LINK_DOWNED,
    ("counters", "port_rcv_errors"): Signal.IB_RECEIVE_ERRORS,
    ("counters", "port_xmit_discards"): Signal.IB_SEND_DISCARDS,
    ("hw_counters", "out_of_sequence"): Signal.IB_OUT_OF_SEQUENCE,
    ("hw_counters", "packet_seq_err"): Signal.IB_PACKET_SEQUENCE_ERRORS,
    ("hw_counters", "local_ack_timeout_err"): Signal.IB_ACK_TIMEOUTS,
    ("hw_counters", "rnr_nak_retry_err"): Signal.IB_RNR_RETRIES_EXCEEDED,
    ("hw_counters", "roce_slow_restart"): Signal.IB_SLOW_RESTARTS,
}
_INFINIBAND_ONLY: Mapping[_File, Signal] = {
    ("counters", "symbol_error"): Signal.IB_SYMBOL_ERRORS,
    ("counters", "link_error_recovery"): Signal.IB_LINK_RECOVERIES,
    ("counters", "local_link_integrity_errors"): Signal.IB_LINK_INTEGRITY,
    ("counters", "excessive_buffer_overrun_errors"): Signal.IB_BUFFER_OVERRUNS,
}
"""The registers of an InfiniBand link; a RoCE port shows the files too, and they mean little there (C136)."""
_SELDOM: Mapping[_File, Signal] = {
    ("hw_counters", "np_cnp_sent"): Signal.IB_CNP_SENT,
    ("hw_counters", "rp_cnp_handled"): Signal.IB_CNP_HANDLED,
    ("hw_counters", "out_of_buffer"): Signal.IB_OUT_OF_BUFFER,
}
_SELDOM_INFINIBAND: Mapping[_File, Signal] = {
    ("counters", "port_rcv_remote_physical_errors"): Signal.IB_REMOTE_PHYSICAL_ERRORS,
    ("counters", "port_rcv_switch_relay_errors"): Signal.IB_SWITCH_RELAY_ERRORS,
    ("counters", "port_xmit_constraint_errors"): Signal.IB_SEND_CONSTRAINT_ERRORS,
    ("counters", "port_rcv_constraint_errors"): Signal.IB_RECEIVE_CONSTRAINT_ERRORS,
    ("counters", "VL15_dropped"): Signal.IB_VL15_DROPPED,
    ("counters", "port_xmit_wait"): Signal.IB_SEND_WAIT,
}
"""Once a minute: what no rule counts."""
_EVERY_LOOK_OF_COUNTERS = ({**_BOTH_LAYERS, **_INFINIBAND_ONLY}, _BOTH_LAYERS)
_ALL_COUNTERS = ({**_EVERY_LOOK_OF_COUNTERS[0], **_SELDOM, **_SELDOM_INFINIBAND}, {**_BOTH_LAYERS, **_SELDOM})
"""Of an InfiniBand port, and of an Ethernet one."""

_RATE = re.compile(r"\s*(\d+(?:\.\d+)?) Gb/sec")
_ACTIVE, _LINK_UP = 4.0, 5.0
_NOT_THERE = "PORT_GONE"
_BURST = 1.1
"""A port's counters can't grow faster than its link, but the two looks at them are not at the same moment as ours."""


@dataclass(slots=True)
class _Port:
    """A port that has been seen."""

    name: str
    folder: str
    ethernet: bool
    interface: str | None
    """Folder of the network interface that is this port; none where it has none."""
    refused: dict[Signal, tuple[Status, str]] = field(default_factory=dict)
    """Signals whose files can't be read, with what they said: not read again, each try may write to the kernel log."""
    bytes_at: dict[Signal, tuple[float, float]] = field(default_factory=dict)
    """The last (time, bytes) of each direction."""
    rate_bits: float | None = None
    was_gone: bool = False


class InfinibandSource:
    """Reads all ports that are not virtual functions. A host without any says nothing, and that is no fault (C127)."""

    def __init__(
        self,
        root: Path = ROOT,
        *,
        node: NodeId,
        clock: Clock | None = None,
        counters_every_s: float = MIDDLE_S,
    ) -> None:
        """`counters_every_s`: counters are asked of the card's firmware; more often costs and shows nothing. So often
        is the rate looked at too."""
        self._root = root
        self._clock = clock if clock is not None else SystemClock()
        self._voice = Voice(node, self._clock)
        self._counters, self._seldom = Every(counters_every_s), Every(SLOW_S)
        self._ports: dict[str, _Port] = {}
        self._devices: dict[str, tuple[str, ...]] = {}
        self._files = OpenFiles()

    def read(self) -> Round:
        """One look: states each time, counters every `counters_every_s`."""
        try:
            here = dict(self._list())
        except FileNotFoundError:
            here = {}
        except OSError as error:
            cause = cause_of(error)
            answers = self._voice.missing(self._voice.node, Signal.IB_ANSWERS, _status(error), cause)
            return Round(readings=(answers,), error=f"InfiniBand: {self._root}: {cause}")
        if not here and not self._ports:
            return Round(readings=())
        now_s = self._clock.now_s()
        counters = self._counters.due(now_s)
        seldom = counters and self._seldom.due(now_s)
        readings = [self._voice.value(self._voice.node, Signal.IB_ANSWERS, 1.0)]
        for name, folder in here.items():
            if name not in self._ports:
                self._ports[name] = self._meet(name, folder)
        for name, port in self._ports.items():
            if name not in here:
                readings.append(self._voice.missing(name, Signal.IB_PORT_PRESENT, Status.LOST, _NOT_THERE))
                self._part_from(port)
                continue
            readings += self._state(port, all_of_it=counters)
            if counters:
                readings += self._counts(port, seldom=seldom)
        return Round(readings=tuple(readings))

    def _list(self) -> Iterator[tuple[str, str]]:
        root = str(self._root)
        here = sorted(os.listdir(root))
        # A device's ports do not change while it is there; looking for them anew each second would be half the cost.
        self._devices = {device: ports for device, ports in self._devices.items() if device in here}
        for device in here:
            if device not in self._devices:
                self._devices[device] = _ports(f"{root}/{device}")
            for number in self._devices[device]:
                yield f"{device}/{number}", f"{root}/{device}/ports/{number}"

    def _meet(self, name: str, folder: str) -> _Port:
        try:
            ethernet = _text(f"{folder}/link_layer") == "Ethernet"
        except OSError:
            ethernet = False  # a device of another kind (C128)
        return _Port(name=name, folder=folder, ethernet=ethernet, interface=_interface(folder))

    def _part_from(self, port: _Port) -> None:
        """What it said is no more; it may come back as another card, with other files."""
        port.was_gone = True
        port.bytes_at.clear()
        port.refused.clear()
        port.rate_bits = None
        for folder in _folders(port):
            self._files.close(folder)

    def _state(self, port: _Port, *, all_of_it: bool) -> list[Reading]:
        """Whether it is up; of one that isn't, and else now and then, all that there is to say."""
        voice, name = self._voice, port.name
        self._files.follow(port.folder)
        state = self._number(port, "state", Signal.IB_PORT_STATE)
        readings = [state]
        if all_of_it or state.value != _ACTIVE or port.was_gone:
            port.was_gone = False
            phys = self._number(port, "phys_state", Signal.IB_PORT_PHYS_STATE)
            readings += [
                voice.value(name, Signal.IB_PORT_PRESENT, 1.0),
                voice.value(name, Signal.IB_PORT_ETHERNET, 1.0 if port.ethernet else 0.0),
                phys,
                self._rate(port, up=phys.value == _LINK_UP),
            ]
        return readings

    def _number(self, port: _Port, file: str, signal: Signal) -> Reading:
        """The number of a line like `4: ACTIVE`. Asked each time: a port's state is never given up."""
        try:
            text = self._files.text(port.folder, file)
        except OSError as error:
            return self._voice.missing(port.name, signal, _status(error), cause_of(error))
        number, _, word = text.partition(":")
        if not number.isdigit():
            return self._voice.missing(port.name, signal, Status.STALE, "NOT_A_STATE", detail=text[:80])
        return self._voice.value(port.name, signal, float(number), detail=word.strip() or None)

    def _rate(self, port: _Port, *, up: bool) -> Reading:
        signal = Signal.IB_PORT_RATE
        port.rate_bits = None
        if not up:
            # A port that is down shows a rate too, its slowest: that is no slow link (C131).
            return self._voice.missing(port.name, signal, Status.STALE, "PORT_NOT_UP")
        try:
            text = self._files.text(port.folder, "rate")
        except OSError as error:
            return self._voice.missing(port.name, signal, _status(error), cause_of(error))
        matched = _RATE.match(text)
        if matched is None:
            return self._voice.missing(port.name, signal, Status.STALE, "NOT_A_RATE", detail=text[:80])
        port.rate_bits = float(matched[1]) * 1e9
        return self._voice.value(port.name, signal, port.rate_bits, detail=text)

    def _counts(self, port: _Port, *, seldom: bool) -> list[Reading]:
        files = (_ALL_COUNTERS if seldom else _EVERY_LOOK_OF_COUNTERS)[port.ethernet]
        for folder in _folders(port)[1:]:
            self._files.follow(folder)
        readings = [self._count(port, f"{port.folder}/{at}", file, signal) for (at, file), signal in files.items()]
        readings += [self._traffic(port, f"{port.folder}/{at}", file, sig) for (at, file), sig in _TRAFFIC.items()]
        if port.interface is not None:
            readings.append(self._count(port, port.interface, "carrier_changes", Signal.IB_CARRIER_CHANGES))
        return readings

    def _traffic(self, port: _Port, folder: str, file: str, signal: Signal) -> Reading:
        reading = self._count(port, folder, file, signal, times=_WORD_BYTES)
        if reading.value is None:
            return reading
        before = port.bytes_at.get(signal)
        port.bytes_at[signal] = (reading.at_s, reading.value)
        if before is None or port.rate_bits is None or reading.at_s <= before[0]:
            return reading
        bits = 8 * (reading.value - before[1]) / (reading.at_s - before[0])
        if bits > _BURST * port.rate_bits:
            detail = f"{bits / 1e9:.0f} Gb/s on a port of {port.rate_bits / 1e9:.0f} Gb/s"
            return self._voice.missing(port.name, signal, Status.STALE, "IMPLAUSIBLE", detail=detail)
        return reading

    def _count(self, port: _Port, folder: str, file: str, signal: Signal, *, times: int = 1) -> Reading:
        if signal in port.refused:
            return self._voice.missing(port.name, signal, *port.refused[signal])
        try:
            text = self._files.text(folder, file)
        except OSError as error:
            status = Status.NO_PERMISSION if isinstance(error, PermissionError) else Status.UNSUPPORTED
            port.refused[signal] = (status, cause_of(error))
            return self._voice.missing(port.name, signal, *port.refused[signal])
        if text.isdigit():
            return self._voice.value(port.name, signal, float(int(text) * times))
        # "N/A (no PMA)": a device without a performance agent (C125).
        port.refused[signal] = (Status.UNSUPPORTED, "NO_PMA" if text.startswith("N/A") else "NOT_A_NUMBER")
        logger.info("InfiniBand: %s/%s says %r; it is not read again", folder, file, text[:80])
        return self._voice.missing(port.name, signal, *port.refused[signal])


def _folders(port: _Port) -> tuple[str, ...]:
    """Where its files are; its own first."""
    own = (port.folder, f"{port.folder}/counters", f"{port.folder}/hw_counters")
    return own if port.interface is None else (*own, port.interface)


def _ports(device: str) -> tuple[str, ...]:
    """The numbers of a device's ports; none of a virtual function, which is somebody else's and has no own counters."""
    if os.path.exists(f"{device}/device/physfn"):
        return ()
    try:
        return tuple(number for number in sorted(os.listdir(f"{device}/ports")) if number.isdigit())
    except (FileNotFoundError, NotADirectoryError):
        return ()


def _interface(folder: str) -> str | None:
    """The network interface that is this port."""
    device, number = folder.rsplit("/ports/", 1)
    try:
        interfaces = sorted(os.listdir(f"{device}/device/net"))
    except OSError:
        return None
    for interface in interfaces:
        at = f"{device}/device/net/{interface}"
        try:
            same_port = int(_text(f"{at}/dev_port")) == int(number) - 1
        except (OSError, ValueError):
            same_port = len(interfaces) == 1
        if same_port:
            return at
    return None


def _text(path: str) -> str:
    return Path(path).read_text(encoding="ascii", errors="replace").strip()


def _status(error: OSError) -> Status:
    return Status.NO_PERMISSION if isinstance(error, PermissionError) else Status.STALE
