"""The kernel log source over real lines (tests/health/samples), a plain file, a pipe and /dev/kmsg's own form."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path

import pytest

from tidegate.health.readings import Reading, Signal, Status
from tidegate.health.sources.kmsg import KmsgSource, dated, pci_address
from tidegate.ids import NodeId
from tidegate.testing.fake_clock import FakeClock

SAMPLES = Path(__file__).parent / "samples"
FELL = (
    "[ 1843.308145] NVRM: The NVIDIA GPU 0000:b3:00.0\n"
    "               NVRM: (PCI ID: 10de:26b5) installed in this system has\n"
    "               NVRM: fallen off the bus and is not responding to commands.\n"
)


class Log:
    """A kernel log that is being followed."""

    def __init__(self, path: Path, node: NodeId, clock: FakeClock) -> None:
        self.path = path
        self.clock = clock
        path.write_text("NVRM: Xid (PCI:0000:01:00): 79, from before we came\n")
        self.source = KmsgSource(path, node=node, clock=clock, boot_at_s=lambda: clock.now_s() - 2000.0)
        assert self.events() == [], "what was there before is not news"

    def write(self, text: str) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text)

    def events(self) -> list[Reading]:
        return [r for r in self.source.read().readings if r.signal is not Signal.KMSG_ANSWERS]


@pytest.fixture
def log(tmp_path: Path, node: NodeId, clock: FakeClock) -> Log:
    return Log(tmp_path / "kmsg", node, clock)


def test_every_real_xid_line_is_read(log: Log) -> None:
    text = (SAMPLES / "xid-lines.txt").read_text(encoding="utf-8")
    log.write(text)
    events = log.events()
    assert len(events) == text.count("NVRM: Xid (") + 1, "and the GPU that fell off the bus without one"
    assert {event.signal for event in events} == {Signal.GPU_XID}
    assert events[0].subject == "pci:0000:01:00"
    assert (events[0].value, events[0].detail) == (31, "GPU memory page fault")
    fatal = next(event for event in events if event.value == 144)
    assert fatal.detail is not None
    assert fatal.detail.startswith("SAW_MVB Fatal")


def test_a_real_dmesg_of_a_gpu_whose_gsp_hangs_is_one_event_a_line(log: Log) -> None:
    log.write((SAMPLES / "xid-dmesg-119.log").read_text(encoding="utf-8"))
    assert {(event.subject, event.value) for event in log.events()} == {("pci:0000:9b:00", 119.0)}


def test_c144_three_lines_without_an_xid_are_one_fall_off_the_bus(log: Log) -> None:
    log.write(FELL)
    (event,) = log.events()
    assert (event.subject, event.value) == ("pci:0000:b3:00", 79.0)
    # The same in one record of /dev/kmsg, where the kernel writes a line's end as \x0a.
    log.write(
        "4,9,1,-;NVRM: The NVIDIA GPU 0000:b4:00.0\\x0aNVRM: fallen off the bus and is not responding to commands.\n"
    )
    assert [event.subject for event in log.events()] == ["pci:0000:b4:00"]


def test_c113_the_xid_that_no_metric_shows_is_in_the_log(log: Log) -> None:
    log.write("NVRM: Xid (PCI:0000:18:00): 62, x\nNVRM: Xid (PCI:0000:18:00): 45, y\n")
    assert [event.value for event in log.events()] == [62, 45]


@pytest.mark.parametrize(
    ("line", "written_s"),
    [
        ("[1105056.784211] NVRM: x", 1000.0 + 1105056.784211),
        ("6,1234,1105056784211,-;NVRM: x", 1000.0 + 1105056.784211),
        (
            "2025-01-21T04:41:44,285060+00:00 NVRM: x",
            datetime.fromisoformat("2025-01-21T04:41:44.285060+00:00").timestamp(),
        ),
        ("[Sun Feb 23 16:24:18 2025] NVRM: x", datetime(2025, 2, 23, 16, 24, 18).timestamp()),
        ("NVRM: x", None),
    ],
)
def test_c192_times_since_boot_and_by_the_wall_are_one_and_no_zone_is_the_machines(
    line: str, written_s: float | None
) -> None:
    assert dated(line, 1000.0) == (pytest.approx(written_s) if written_s is not None else None, "NVRM: x")


def test_an_event_has_its_own_time_unless_that_can_not_be_now(log: Log) -> None:
    log.write("[ 1996.5] NVRM: Xid (PCI:0000:18:00): 31, a\n")  # the machine is up for 2,000 s
    assert log.events()[0].at_s == pytest.approx(log.clock.now_s() - 3.5)
    log.write("[Sun Feb 23 16:24:18 2025] NVRM: Xid (PCI:0000:18:00): 31, a\n")
    assert log.events()[0].at_s == log.clock.now_s(), "what has just been written has just happened"


def test_the_past_is_read_once_under_its_own_time(tmp_path: Path, node: NodeId, clock: FakeClock) -> None:
    """A plain log's lines without a date, or with seconds since some boot, may be of any time: nobody's event."""
    path = tmp_path / "kern.log"
    when = datetime.fromtimestamp(clock.now_s() - 30.0).astimezone()
    later = datetime.fromtimestamp(clock.now_s() + 30.0).astimezone()
    xid = "NVRM: Xid (PCI:0000:18:00): "
    path.write_text(
        f"{xid}31, undated\n[ 1990.5] {xid}32, since which boot?\n6,1,1990500000,-;{xid}43, likewise\n"
        f"{later.isoformat(timespec='microseconds')} {xid}45, not yet\n"
        f"{when.isoformat(timespec='microseconds')} {xid}79, dated\n"
    )
    source = KmsgSource(path, node=node, clock=clock, boot_at_s=lambda: clock.now_s() - 2000.0)
    [event] = [r for r in source.read().readings if r.signal is Signal.GPU_XID]
    assert (event.value, event.at_s) == (79, pytest.approx(clock.now_s() - 30.0))
    assert [r for r in source.read().readings if r.signal is Signal.GPU_XID] == []
    with path.open("a") as file:
        file.write(f"{xid}13, now\n")
    [event] = [r for r in source.read().readings if r.signal is Signal.GPU_XID]
    assert (event.value, event.at_s) == (13, clock.now_s())


@pytest.mark.parametrize(
    ("line", "signal"),
    [
        ("mlx5_core 0000:18:00.0: temp_warn:210:(pid 0): High temperature on sensors with bit set 0x1", Signal.NIC_HOT),
        (
            "mlx5_core 0000:18:00.0: mlx5_pcie_event:299: Detected insufficient power on the PCIe slot (27W).",
            Signal.NIC_UNDERPOWERED,
        ),
        (
            "mlx5_core 0000:18:00.0: poll_health:800:(pid 0): device's health compromised - reached miss count",
            Signal.NIC_UNHEALTHY,
        ),
        (
            "mlx5_core 0000:18:00.0: ACCESS_REG(0x805) timeout. Will cause a leak of a command resource",
            Signal.NIC_COMMAND_LEAK,
        ),
    ],
)
def test_what_a_network_card_says_of_itself_is_an_event_of_that_card(log: Log, line: str, signal: Signal) -> None:
    log.write(f"4,77,1999000000,-;{line}\n SUBSYSTEM=pci\n DEVICE=+pci:0000:18:00.0\n")
    (event,) = log.events()
    assert (event.subject, event.signal, event.value) == ("pci:0000:18:00", signal, 1.0)


def test_other_lines_are_nobodys_event(log: Log) -> None:
    log.write("mlx5_core 0000:18:00.0: Port module event: module 0, Cable plugged\nNVRM: loading NVIDIA UNIX\nxid 79\n")
    assert log.events() == []


def test_a_line_that_is_half_written_waits_for_its_end(log: Log) -> None:
    log.write("NVRM: Xid (PCI:0000:18:00): 7")
    assert log.events() == []
    log.write("9, GPU has fallen off the bus\n")
    assert [event.value for event in log.events()] == [79]


def test_a_log_that_is_cut_or_replaced_is_followed_on(log: Log, tmp_path: Path) -> None:
    log.path.write_text("NVRM: Xid (PCI:0000:18:00): 31, a\n")
    assert [event.value for event in log.events()] == [31]
    log.path.rename(tmp_path / "kmsg.1")
    log.path.write_text("NVRM: Xid (PCI:0000:18:00): 48, b\n")
    log.events()
    assert [event.value for event in log.events()] in ([48], [])
    log.write("NVRM: Xid (PCI:0000:18:00): 95, c\n")
    assert 95 in [event.value for event in log.events()]


def test_a_pipe_is_followed_like_a_file(tmp_path: Path, node: NodeId, clock: FakeClock) -> None:
    os.mkfifo(tmp_path / "pipe")
    source = KmsgSource(tmp_path / "pipe", node=node, clock=clock)
    assert [reading.value for reading in source.read().readings] == [1.0]
    with (tmp_path / "pipe").open("w") as pipe:
        pipe.write("NVRM: Xid (PCI:0000:18:00): 79, GPU has fallen off the bus\n")
        pipe.flush()
        assert [reading.value for reading in source.read().readings] == [1.0, 79.0]
    source.close()


def test_no_log_and_no_right_to_read_it_are_told_apart(tmp_path: Path, node: NodeId) -> None:
    absent = KmsgSource(tmp_path / "none", node=node).read()
    assert [(r.status, r.cause) for r in absent.readings] == [(Status.UNSUPPORTED, "ENOENT")]
    assert absent.error is not None
    folder = KmsgSource(tmp_path, node=node).read()
    assert [(r.status, r.value) for r in folder.readings] == [(Status.STALE, None)]


def test_this_machines_own_kernel_log_can_be_followed_or_says_why_not(node: NodeId) -> None:
    source = KmsgSource(node=node)
    (answers,) = (r for r in source.read().readings if r.signal is Signal.KMSG_ANSWERS)
    assert answers.value == 1.0 or answers.cause in ("EPERM", "EACCES", "ENOENT")
    source.close()


def test_addresses_are_the_same_whoever_wrote_them() -> None:
    assert pci_address("00000000:5D:00.0") == pci_address("0000:5d:00") == "0000:5d:00"
