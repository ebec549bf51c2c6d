"""The host source over real file systems and a copied /proc."""

from __future__ import annotations

from pathlib import Path

from tidegate.health.readings import Reading, Signal, Status
from tidegate.health.sources.host import HostSource, UnsynchronisedError
from tidegate.ids import NodeId


def read(source: HostSource) -> dict[tuple[str, Signal], Reading]:
    return {(reading.subject, reading.signal): reading for reading in source.read().readings}


def test_this_machine_has_memory_a_disk_and_a_dev_shm(node: NodeId, tmp_path: Path) -> None:
    seen = read(HostSource(node=node, disks=[tmp_path]))
    ratio = seen[f"disk:{tmp_path}", Signal.HOST_DISK_FREE_RATIO].value
    assert ratio is not None
    assert 0 < ratio < 1
    assert seen[f"disk:{tmp_path}", Signal.HOST_DISK_WRITABLE].value == 1
    assert (seen[node, Signal.HOST_MEMORY_AVAILABLE].value or 0) > 2**20
    assert (seen[node, Signal.HOST_SHM_SIZE].value or 0) > 0


def test_what_is_not_there_is_missing_one_by_one(node: NodeId, tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:       100 kB\n")
    seen = read(HostSource(node=node, disks=[tmp_path / "gone"], shm=tmp_path / "no-shm", proc=tmp_path))
    assert seen[f"disk:{tmp_path / 'gone'}", Signal.HOST_DISK_FREE].cause == "ENOENT"
    assert seen[node, Signal.HOST_MEMORY_AVAILABLE].cause == "NOT_IN_MEMINFO"
    assert seen[node, Signal.HOST_OOM_KILLS].cause == "ENOENT"
    assert seen[node, Signal.HOST_SHM_FREE].cause == "ENOENT"
    assert all(reading.value is None for reading in seen.values() if reading.status is not Status.OK)


def test_memory_and_oom_kills_are_the_kernels_own(node: NodeId, tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:       4096 kB\nMemFree: 1 kB\nMemAvailable:   1024 kB\n")
    (tmp_path / "vmstat").write_text("nr_free_pages 1\noom_kill 3\n")
    seen = read(HostSource(node=node, proc=tmp_path))
    assert seen[node, Signal.HOST_MEMORY_AVAILABLE].value == 1024 * 1024
    assert seen[node, Signal.HOST_MEMORY_AVAILABLE_RATIO].value == 0.25
    assert seen[node, Signal.HOST_OOM_KILLS].value == 3


def test_a_clock_that_nothing_disciplines_has_no_offset(node: NodeId) -> None:
    def adrift() -> float:
        raise UnsynchronisedError()

    def silent() -> float:
        raise OSError(38, "ENOSYS")

    signal = Signal.HOST_CLOCK_OFFSET
    assert read(HostSource(node=node, clock_offset_s=lambda: -0.02))[node, signal].value == -0.02
    assert read(HostSource(node=node, clock_offset_s=adrift))[node, signal].cause == "UNSYNCHRONISED"
    assert read(HostSource(node=node, clock_offset_s=silent))[node, signal].status is Status.UNSUPPORTED
