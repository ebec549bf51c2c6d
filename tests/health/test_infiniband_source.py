"""The InfiniBand source over copies of real sysfs trees (tests/health/samples)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tidegate.health.readings import CEILINGS, COUNTERS, Reading, Signal, Status
from tidegate.health.sources.infiniband import InfinibandSource
from tidegate.ids import NodeId
from tidegate.testing.fake_clock import FakeClock

SAMPLES = Path(__file__).parent / "samples"


def sample(name: str, folder: Path) -> Path:
    """The tree, laid out as real files."""
    for line in (SAMPLES / f"ib-{name}.txt").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            path, _, text = line.partition(" = ")
            (folder / name / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / name / path).write_text(text + "\n")
    return folder / name


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """An H100 host: eight NDR ports and an Ethernet bond, counters stuck at their ceilings."""
    return sample("h100-host", tmp_path)


@pytest.fixture
def source(tree: Path, node: NodeId, clock: FakeClock) -> InfinibandSource:
    return InfinibandSource(tree, node=node, clock=clock)


def read(source: InfinibandSource) -> dict[tuple[str, Signal], Reading]:
    return {(reading.subject, reading.signal): reading for reading in source.read().readings}


def port(tree: Path, device: str = "mlx5_0") -> Path:
    return tree / device / "ports" / "1"


def test_a_real_h100_host_reads_active_at_400_with_raw_counters(source: InfinibandSource) -> None:
    seen = read(source)
    ports = {subject for subject, signal in seen if signal is Signal.IB_PORT_PRESENT}
    assert len(ports) == 9
    assert seen["mlx5_0/1", Signal.IB_PORT_STATE].value == 4
    assert seen["mlx5_0/1", Signal.IB_PORT_PHYS_STATE].value == 5
    assert seen["mlx5_0/1", Signal.IB_PORT_RATE].value == 400e9
    stuck = [subject for subject in ports if seen.get((subject, Signal.IB_BUFFER_OVERRUNS))]
    assert len(stuck) == 8
    for subject in stuck:
        reading = seen[subject, Signal.IB_BUFFER_OVERRUNS]
        assert reading.value == CEILINGS[Signal.IB_BUFFER_OVERRUNS] == 15, "at the ceiling, and the consumer can tell"
    assert all(r.status in (Status.OK, Status.UNSUPPORTED) for r in seen.values())


def test_c125_no_pma_gives_up_that_file_and_not_the_device(
    tree: Path, source: InfinibandSource, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    file = port(tree) / "counters" / "link_downed"
    file.write_text("N/A (no PMA)\n")
    assert read(source)["mlx5_0/1", Signal.IB_LINK_DOWNED].cause == "NO_PMA"
    file.write_text("3\n")
    seen = read(InfinibandSource(tree, node=NodeId("n")))
    assert seen["mlx5_0/1", Signal.IB_LINK_DOWNED].value == 3, "a new source asks anew"
    assert seen["mlx5_1/1", Signal.IB_LINK_DOWNED].value is not None


def test_a_file_that_refuses_is_not_read_again_since_each_try_floods_the_kernel_log(
    tree: Path, source: InfinibandSource, clock: FakeClock
) -> None:
    file = port(tree) / "counters" / "VL15_dropped"
    file.unlink()
    file.mkdir()  # reading it fails as EINVAL does on a ConnectX-7 in switch mode
    assert read(source)["mlx5_0/1", Signal.IB_VL15_DROPPED].status is Status.UNSUPPORTED
    file.rmdir()
    file.write_text("7")
    clock.advance(60)
    assert read(source)["mlx5_0/1", Signal.IB_VL15_DROPPED].value is None


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_we_may_not_read_is_no_permission_and_never_a_zero(tree: Path, source: InfinibandSource) -> None:
    (port(tree) / "counters" / "symbol_error").chmod(0)
    reading = read(source)["mlx5_0/1", Signal.IB_SYMBOL_ERRORS]
    assert (reading.value, reading.status) == (None, Status.NO_PERMISSION)


def test_c127_a_host_without_any_port_is_quiet(tmp_path: Path, node: NodeId) -> None:
    seen = InfinibandSource(tmp_path / "infiniband", node=node).read()
    assert (seen.readings, seen.error) == ((), None)


def test_c128_other_rdma_devices_beside_the_hca_are_tolerated(tmp_path: Path, node: NodeId, clock: FakeClock) -> None:
    tree = sample("mixed-hosts", tmp_path)
    (tree / "irdma0" / "ports" / "1").mkdir(parents=True)
    (tree / "hfi1_0" / "ports" / "1" / "counters" / "SwLinkUp,32").write_text("1")
    seen = read(InfinibandSource(tree, node=node, clock=clock))
    assert seen["mlx5_0/1", Signal.IB_PORT_STATE].value == 4
    assert seen["hfi1_0/1", Signal.IB_PORT_PRESENT].value == 1
    irdma = [reading for (subject, _), reading in seen.items() if subject == "irdma0/1"]
    assert {reading.signal for reading in irdma if reading.value is not None} == {
        Signal.IB_PORT_PRESENT,
        Signal.IB_PORT_ETHERNET,
    }
    assert seen["irdma0/1", Signal.IB_PORT_STATE].status is Status.STALE, "never active by default"


@pytest.mark.parametrize(
    ("state", "phys", "expected"), [("1: DOWN", "2: Polling", (1, 2)), ("1: DOWN", "3: Disabled", (1, 3))]
)
def test_c131_a_port_that_is_not_up_is_down_in_its_own_way_and_has_no_rate(
    tree: Path, source: InfinibandSource, state: str, phys: str, expected: tuple[int, int]
) -> None:
    (port(tree) / "state").write_text(state + "\n")
    (port(tree) / "phys_state").write_text(phys + "\n")
    (port(tree) / "rate").write_text("10 Gb/sec (4X SDR)\n")
    seen = read(source)
    assert (seen["mlx5_0/1", Signal.IB_PORT_STATE].value, seen["mlx5_0/1", Signal.IB_PORT_PHYS_STATE].value) == expected
    assert seen["mlx5_0/1", Signal.IB_PORT_RATE].value is None, "a down port is no slow link"


def test_a_port_that_trained_down_reads_its_lower_rate(tree: Path, source: InfinibandSource) -> None:
    (port(tree) / "rate").write_text("200 Gb/sec (4X HDR)")
    assert read(source)["mlx5_0/1", Signal.IB_PORT_RATE].value == 200e9


def test_a_device_that_vanishes_is_lost_and_comes_back_by_itself(
    tree: Path, source: InfinibandSource, tmp_path: Path
) -> None:
    read(source)
    (tree / "mlx5_4").rename(tmp_path / "away")
    reading = read(source)["mlx5_4/1", Signal.IB_PORT_PRESENT]
    assert (reading.status, reading.cause) == (Status.LOST, "PORT_GONE")
    (tmp_path / "away").rename(tree / "mlx5_4")
    assert read(source)["mlx5_4/1", Signal.IB_PORT_PRESENT].value == 1
    tree.rename(tmp_path / "tree-away")
    lost = [reading for reading in source.read().readings if reading.status is Status.LOST]
    assert len(lost) == 9, "the driver was unloaded: every port is lost, none is healthy"


def test_c134_data_counters_are_words_of_four_bytes_and_no_port_is_faster_than_its_link(
    tree: Path, source: InfinibandSource, clock: FakeClock
) -> None:
    file = port(tree) / "counters" / "port_rcv_data"
    file.write_text("1000")
    assert read(source)["mlx5_0/1", Signal.IB_RECEIVED].value == 4000
    clock.advance(5)
    file.write_text(str(1000 + 5 * 48_000_000_000 // 4))  # 48 GB/s of the link's 50
    assert read(source)["mlx5_0/1", Signal.IB_RECEIVED].value is not None
    clock.advance(5)
    file.write_text(str(1000 + 10 * 1000_000_000_000 // 4))  # 2 Tb/s and more on 400 Gb/s
    assert read(source)["mlx5_0/1", Signal.IB_RECEIVED].cause == "IMPLAUSIBLE"


def test_c136_an_ethernet_bond_is_ethernet_and_has_none_of_infinibands_registers(
    tree: Path, source: InfinibandSource
) -> None:
    (port(tree, "mlx5_bond_0") / "link_layer").write_text("Ethernet\n\n")
    seen = read(source)
    assert seen["mlx5_bond_0/1", Signal.IB_PORT_ETHERNET].value == 1
    assert ("mlx5_bond_0/1", Signal.IB_SYMBOL_ERRORS) not in seen
    assert seen["mlx5_bond_0/1", Signal.IB_LINK_DOWNED].value is not None


def test_a_virtual_function_is_somebody_elses(tree: Path, source: InfinibandSource) -> None:
    (tree / "mlx5_1" / "device" / "physfn").mkdir(parents=True)
    assert not [subject for subject, _ in read(source) if subject.startswith("mlx5_1/")]


def test_a_roce_ports_carrier_changes_come_from_its_own_interface(tree: Path, node: NodeId, clock: FakeClock) -> None:
    for interface, dev_port, changes in (("eth0", 0, 11), ("eth1", 1, 99)):
        at = tree / "mlx5_bond_0" / "device" / "net" / interface
        at.mkdir(parents=True)
        (at / "dev_port").write_text(str(dev_port))
        (at / "carrier_changes").write_text(str(changes))
    seen = read(InfinibandSource(tree, node=node, clock=clock))
    assert seen["mlx5_bond_0/1", Signal.IB_CARRIER_CHANGES].value == 11


def test_states_are_read_each_time_and_counters_every_five_seconds(source: InfinibandSource, clock: FakeClock) -> None:
    counted = []
    for _ in range(11):
        clock.advance(1)
        counted.append(bool({signal for _, signal in read(source)} & set(CEILINGS)))
    assert counted == [True] + 4 * [False] + [True] + 4 * [False] + [True]


def test_every_register_that_sticks_is_a_counter() -> None:
    assert set(CEILINGS) <= COUNTERS
