"""All that NVML says of a GPU beside its temperature: units, codes, generations, cadence, events."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

from tidegate.health.readings import MIDDLE_S, PERIODS_S, SLOW_S, ClockReason, Reading, Signal, Status
from tidegate.health.sources import nvml_gpm, nvml_links
from tidegate.health.sources.nvml import NvmlSource
from tidegate.health.sources.nvml_events import NvmlEventSource
from tidegate.health.sources.nvml_links import bit_error_ratio
from tidegate.health.sources.nvml_values import HOT, MIDDLE, SLOW
from tidegate.ids import NodeId
from tidegate.testing import fake_nvml
from tidegate.testing.fake_clock import FakeClock
from tidegate.testing.fake_nvml import GpuState, NvmlState, uuid_of
from waiting import wait_until

READINGS = tuple(chain.from_iterable(ask.signals for ask in (*HOT, *MIDDLE, *SLOW))) + nvml_links.SIGNALS


def gpu(index: int) -> str:
    return uuid_of("node-a", index)


def look(source: NvmlSource, index: int = 0) -> dict[Signal, Reading]:
    return looks(source)[index]


def looks(source: NvmlSource) -> list[dict[Signal, Reading]]:
    """One look, GPU by GPU."""
    seen = source.read()
    return [{r.signal: r for r in seen.readings if r.subject == listed.uuid} for listed in seen.gpus]


def test_a_healthy_h100_at_work_in_base_units(source: NvmlSource, state: NvmlState) -> None:
    state.set(0, "reasons", "0x4")
    state.set(0, "field.270.0", 1_500_000_000)
    state.set(0, "ecc.0.0", 12)
    seen = look(source)
    expected = {
        Signal.GPU_MEMORY_TEMPERATURE: 66.0,
        Signal.GPU_SM_CLOCK: 1980e6,
        Signal.GPU_MEMORY_CLOCK: 2619e6,
        Signal.GPU_CLOCK_REASONS: float(ClockReason.SW_POWER_CAP),
        Signal.GPU_THROTTLED_HW_THERMAL: 1.5,
        Signal.GPU_POWER: 640.0,
        Signal.GPU_POWER_LIMIT: 700.0,
        Signal.GPU_ENERGY: 81234567.89,
        Signal.GPU_PERSISTENCE: 1.0,
        Signal.GPU_ECC_ENABLED: 1.0,
        Signal.GPU_ECC_CORRECTED: 12.0,
        Signal.GPU_ECC_UNCORRECTED: 0.0,
        Signal.GPU_ROW_PENDING: 0.0,
        Signal.GPU_BANKS_EXHAUSTED: 0.0,
        Signal.GPU_SRAM_THRESHOLD: 0.0,
        Signal.GPU_PCIE_GENERATION: 5.0,
        Signal.GPU_PCIE_WIDTH_MAX: 16.0,
        Signal.GPU_RECOVERY_ACTION: 0.0,
        Signal.GPU_FABRIC_STATE: 3.0,
        Signal.GPU_FABRIC_SUMMARY: 1.0,
        Signal.GPU_MIG: 0.0,
        Signal.GPU_SLOWDOWN_OFFSET: -2.0,
        Signal.GPU_NVLINKS: 18.0,
        Signal.GPU_NVLINKS_DOWN: 0.0,
        Signal.GPU_NVLINK_CRC: 0.0,
        Signal.GPU_UTILIZATION: 0.98,
    }
    assert {signal: pytest.approx(seen[signal].value) for signal in expected} == expected
    blackwells = {Signal.GPU_NVLINK_RECOVERIES_FAILED, Signal.GPU_NVLINK_BER}
    absolute = {Signal.GPU_SLOWDOWN_LIMIT, Signal.GPU_MEMORY_LIMIT}
    assert {seen[signal].status for signal in blackwells | absolute} == {Status.UNSUPPORTED}


def test_every_signal_of_a_gpu_has_a_reading(source: NvmlSource, state: NvmlState) -> None:
    seen = look(source)
    gpm = set(nvml_gpm.SIGNALS)
    told = {signal for signal in Signal if signal.of_gpu and signal.startswith("gpu_")}
    told -= {Signal.GPU_XID, Signal.GPU_NVLINK_RATE}
    assert told == set(seen), "XIDs are events, and the sum rate is DCGM's"
    assert {signal for signal in told if seen[signal].value is None and signal not in gpm} == {
        Signal.GPU_PROCESSES,
        Signal.GPU_SLOWDOWN_LIMIT,
        Signal.GPU_MEMORY_LIMIT,
        Signal.GPU_NVLINK_RECOVERIES_FAILED,
        Signal.GPU_NVLINK_RECEIVE_ERRORS,
        Signal.GPU_NVLINK_EFFECTIVE_ERRORS,
        Signal.GPU_NVLINK_BER,
    }


@pytest.mark.parametrize("code", [4, 10, 21, 999])
@pytest.mark.parametrize(
    ("key", "signal"),
    [
        ("field.230.0", Signal.GPU_RECOVERY_ACTION),
        ("field.180.0", Signal.GPU_PCIE_FATAL),
        ("ecc.1.0", Signal.GPU_ECC_UNCORRECTED),
        ("rows", Signal.GPU_ROW_FAILURE),
        ("fabric", Signal.GPU_FABRIC_SUMMARY),
        ("field.163.7", Signal.GPU_NVLINK_CRC),
        ("field.165.7", Signal.GPU_NVLINKS_DOWN),
    ],
)
def test_a_value_that_can_not_be_read_is_never_a_healthy_zero(
    source: NvmlSource, state: NvmlState, key: str, signal: Signal, code: int
) -> None:
    """Each field has its own code; the driver leaves 0 in a value that it did not give."""
    state.set(0, key, f"!{code}")
    seen = look(source)
    assert (seen[signal].value, seen[signal].status is Status.OK) == (None, False)
    assert seen[Signal.GPU_ANSWERS].value == 1.0, "one value is not the GPU"
    assert look(source, 1)[Signal.GPU_TEMPERATURE].value == 61.0


def test_c091_the_recovery_action_tells_a_failed_gpu_whose_values_look_well(
    source: NvmlSource, state: NvmlState
) -> None:
    state.set(1, "field.230.0", 1)
    seen = look(source, 1)
    assert (seen[Signal.GPU_RECOVERY_ACTION].value, seen[Signal.GPU_TEMPERATURE].value) == (1.0, 61.0)


def test_c092_power_that_errs_once_is_one_missing_value(source: NvmlSource, state: NvmlState, clock: FakeClock) -> None:
    state.set(0, "power_mw", "!999")
    assert look(source)[Signal.GPU_POWER].value is None
    state.set(0, "power_mw", 27_000)
    clock.advance(MIDDLE_S)
    assert look(source)[Signal.GPU_POWER].value == 27.0


def test_c095_a_gpu_that_is_lost_in_the_middle_of_a_look_is_lost_and_the_others_are_read(
    source: NvmlSource, state: NvmlState
) -> None:
    state.set(1, "ecc.1.0", "!15")
    seen = look(source, 1)
    assert seen[Signal.GPU_ANSWERS].cause == "GPU_IS_LOST"
    assert look(source, 0)[Signal.GPU_ANSWERS].value == 1.0


def test_c098_margins_on_new_parts_and_absolute_limits_on_old_ones(source: NvmlSource, state: NvmlState) -> None:
    state.set(0, "temp", 29)
    state.set(0, "margin", 58)
    for key in ("margin", "field.194.0"):
        state.set(1, key, "!3")
    state.set(1, "threshold.1", 93)
    new, old, *_ = looks(source)
    assert (new[Signal.GPU_MARGIN].value, new[Signal.GPU_SLOWDOWN_OFFSET].value) == (58.0, -2.0)
    assert (old[Signal.GPU_MARGIN].value, old[Signal.GPU_SLOWDOWN_LIMIT].value) == (None, 93.0)


def test_a_t4_has_no_memory_sensor_and_says_zero(source: NvmlSource, state: NvmlState) -> None:
    state.set(0, "field.82.0", 0)
    reading = look(source)[Signal.GPU_MEMORY_TEMPERATURE]
    assert (reading.value, reading.status) == (None, Status.UNSUPPORTED)


def test_c097_gpm_that_always_refuses_is_switched_off_once_and_the_rest_goes_on(
    source: NvmlSource, state: NvmlState, clock: FakeClock, library: Path
) -> None:
    state.set(0, "gpm", "!14")
    for _ in range(6):
        clock.advance(SLOW_S)
        seen = look(source)
    assert seen[Signal.GPU_TENSOR_ACTIVE].status is Status.UNSUPPORTED
    before = fake_nvml.calls(library, "nvmlGpmSampleGet", 0)
    clock.advance(SLOW_S)
    look(source)
    assert fake_nvml.calls(library, "nvmlGpmSampleGet", 0) == before
    assert seen[Signal.GPU_TEMPERATURE].value == 61.0


def test_gpm_without_the_right_says_no_permission(source: NvmlSource, state: NvmlState) -> None:
    state.set(0, "gpm", "!4")
    assert look(source)[Signal.GPU_TENSOR_ACTIVE].status is Status.NO_PERMISSION


@pytest.mark.parametrize("code", [13, 25, 26])
def test_clock_reasons_are_asked_the_older_way_of_an_older_driver(
    source: NvmlSource, state: NvmlState, code: int
) -> None:
    state.set_all("reasons_v", f"!{code}")
    state.set(0, "reasons", "0x40")
    assert look(source)[Signal.GPU_CLOCK_REASONS].value == float(ClockReason.HW_THERMAL)


def test_mig_leaves_temperature_and_power_and_takes_the_rest(source: NvmlSource, state: NvmlState) -> None:
    state.set(0, "mig", 1)
    for key in ("rows", "gpm", "banks"):
        state.set(0, key, "!3")
    seen = look(source)
    assert (seen[Signal.GPU_MIG].value, seen[Signal.GPU_TEMPERATURE].value) == (1.0, 61.0)
    assert seen[Signal.GPU_ROW_FAILURE].status is Status.UNSUPPORTED


def test_the_three_paces(source: NvmlSource, state: NvmlState, clock: FakeClock) -> None:
    seen: dict[Signal, list[int]] = {}
    for second in range(121):
        for signal in look(source):
            seen.setdefault(signal, []).append(second)
        clock.advance(1)
    assert seen[Signal.GPU_TEMPERATURE] == list(range(121))
    assert seen[Signal.GPU_RECOVERY_ACTION] == list(range(121))
    assert seen[Signal.GPU_PCIE_FATAL][:3] == seen[Signal.GPU_NVLINKS_DOWN][:3] == [0, 5, 10]
    assert seen[Signal.GPU_ECC_UNCORRECTED][:2] == seen[Signal.GPU_FABRIC_STATE][:2]
    assert 53 <= seen[Signal.GPU_FABRIC_STATE][1] <= 60


def test_the_paces_that_rules_are_told_are_those_of_the_source() -> None:
    middle = set(chain.from_iterable(ask.signals for ask in MIDDLE)) | set(nvml_links.SIGNALS)
    assert {PERIODS_S.get(signal) for signal in middle} == {MIDDLE_S}
    assert {PERIODS_S.get(signal) for ask in SLOW for signal in ask.signals} == {SLOW_S}
    assert not {signal for ask in HOT for signal in ask.signals} & PERIODS_S.keys()


def test_what_a_card_does_not_have_is_not_asked_again(
    source: NvmlSource, state: NvmlState, clock: FakeClock, library: Path
) -> None:
    state.set(0, "sram_threshold", "!3")
    look(source)
    before = fake_nvml.calls(library, "nvmlDeviceGetSramEccErrorStatus", 0)
    clock.advance(60)
    assert look(source)[Signal.GPU_SRAM_THRESHOLD].status is Status.UNSUPPORTED
    assert fake_nvml.calls(library, "nvmlDeviceGetSramEccErrorStatus", 0) == before


def test_c152_a_slow_reading_is_tied_to_its_gpu(source: NvmlSource, state: NvmlState, clock: FakeClock) -> None:
    looks(source)
    state.set(2, "delay_ms", 30)
    slow = [seen[Signal.GPU_READ].value or 0.0 if Signal.GPU_READ in seen else 0.0 for seen in looks(source)]
    assert slow[2] > 0.1
    assert max(slow[0], slow[1], slow[3]) < slow[2] / 2
    clock.advance(5)
    assert all(Signal.GPU_READ in seen for seen in looks(source)), "of the quick ones now and then"


# NVLink


def test_a_link_that_goes_down_is_counted_and_named(source: NvmlSource, state: NvmlState, clock: FakeClock) -> None:
    look(source)
    state.set(0, "field.165.3", 0)
    state.set(0, "field.165.17", 0)
    state.set(0, "field.165.5", 2)  # asleep is not down
    clock.advance(5)
    down = look(source)[Signal.GPU_NVLINKS_DOWN]
    assert (down.value, down.detail) == (2.0, "links 3, 17 are inactive")


def test_errors_are_summed_over_the_links(source: NvmlSource, state: NvmlState) -> None:
    state.set(0, "field.161.2", 3)
    state.set(0, "field.161.9", 4)
    state.set(0, "field.162.0", 1)
    seen = look(source)
    assert (seen[Signal.GPU_NVLINK_REPLAYS].value, seen[Signal.GPU_NVLINK_RECOVERIES].value) == (7.0, 1.0)


def test_blackwell_counts_by_its_own_names(source: NvmlSource, state: NvmlState) -> None:
    for link in range(18):
        for old in (161, 162, 163):
            state.set(0, f"field.{old}.{link}", "!3")
        for new in (208, 213, 214, 219):
            state.set(0, f"field.{new}.{link}", 1)
        state.set(0, f"field.220.{link}", 15 if link else (3 << 8) + 11)
    seen = look(source)
    assert seen[Signal.GPU_NVLINK_REPLAYS].status is Status.UNSUPPORTED
    assert seen[Signal.GPU_NVLINK_RECOVERIES].value == 18
    assert seen[Signal.GPU_NVLINK_RECOVERIES_FAILED].value == 18
    assert seen[Signal.GPU_NVLINK_BER].value == pytest.approx(3e-11), "the worst link's"


def test_a_bit_error_ratio_is_mantissa_and_exponent() -> None:
    assert bit_error_ratio((5 << 8) + 12) == pytest.approx(5e-12)
    assert bit_error_ratio(255) == 0.0


def test_c140_older_drivers_know_only_sums_and_the_oldest_nothing(
    source: NvmlSource, state: NvmlState, clock: FakeClock
) -> None:
    for index in (0, 1):
        for link in range(18):
            for counter in (161, 162, 163, 165):
                state.set(index, f"field.{counter}.{link}", "!3")
            state.set(index, f"nvlink.{link}", 1)
    state.set(0, "nvlink.4", 0)
    state.set(0, "field.52.0", 9)
    for _ in range(2):
        sums, nothing, *_ = looks(source)
        assert sums[Signal.GPU_NVLINK_REPLAYS].value == 9
        assert sums[Signal.GPU_NVLINKS_DOWN].value == 1
        assert nothing[Signal.GPU_NVLINK_REPLAYS].status is Status.UNSUPPORTED, "unknown, not 0"
        clock.advance(SLOW_S)


def test_c139_a_card_without_nvlink_has_none_that_could_be_down(state: NvmlState, source: NvmlSource) -> None:
    NvmlState(state.path, [GpuState(uuid=uuid_of("node-a", index), links=0) for index in range(2)])
    state.set(1, "field.91.0", "!3")
    for seen, links in zip(looks(source), (0.0, None), strict=True):
        assert (seen[Signal.GPU_NVLINKS].value, seen[Signal.GPU_NVLINKS_DOWN].value) == (links, None)


@pytest.mark.parametrize("shown", ["0", "!3"])
def test_c137_a_gpu_that_shows_no_link_while_its_peers_do_has_lost_all(
    source: NvmlSource, state: NvmlState, shown: str
) -> None:
    state.set(2, "field.91.0", shown)
    down = look(source, 2)[Signal.GPU_NVLINKS_DOWN]
    assert (down.value, down.detail) == (18.0, "no link at all; its peers have 18")


# Events


@pytest.fixture
def events(library: Path, state: NvmlState, node: NodeId, clock: FakeClock) -> Iterator[NvmlEventSource]:
    source = NvmlEventSource(str(library), node=node, clock=clock, wait_s=0.05)
    yield source
    source.close()


def test_an_xid_is_told_once_with_its_gpus_name(events: NvmlEventSource, state: NvmlState) -> None:
    state.set(3, "xid_seq", "1:31")
    assert events.read().readings == (), "what happened before is not told"
    state.set(3, "xid_seq", "2:79")
    state.set(1, "xid_seq", "1:48")
    told = events.read().readings
    assert {(r.subject, r.signal, r.value) for r in told} == {
        (gpu(3), Signal.GPU_XID, 79.0),
        (gpu(1), Signal.GPU_XID, 48.0),
    }
    assert events.read().readings == ()
    state.set(3, "xid_seq", "3:79")
    assert [r.value for r in events.read().readings] == [79.0], "the same again is another event"


def test_a_waiting_look_ends_with_the_event(library: Path, state: NvmlState, node: NodeId) -> None:
    source = NvmlEventSource(str(library), node=node, wait_s=10.0)
    told: list[Reading] = []
    quick = NvmlEventSource(str(library), node=node, wait_s=0.0)
    quick.read()

    def wait() -> None:
        told.extend(source.read().readings)

    thread = threading.Thread(target=wait)
    thread.start()
    sequence = iter(range(1, 1000))

    def happened() -> bool:
        state.set(0, "xid_seq", f"{next(sequence)}:62")
        return bool(told)

    wait_until(happened, 5, "the event ends the wait")
    thread.join(5)
    source.close()
    quick.close()


@pytest.mark.parametrize("code", [15, 999])
def test_a_wait_that_fails_is_tried_again_later_and_ends_nothing(
    events: NvmlEventSource, state: NvmlState, clock: FakeClock, code: int
) -> None:
    events.read()
    state.set_system("wait_error", code)
    failed = events.read()
    assert (failed.readings, failed.error is None) == ((), False)
    state.set_system("wait_error", 0)
    clock.advance(30)
    assert events.read().error is None
    state.set(0, "xid_seq", "1:94")
    assert [r.value for r in events.read().readings] == [94.0]


def test_a_gpu_that_tells_no_events_leaves_the_others_watched(events: NvmlEventSource, state: NvmlState) -> None:
    state.set(0, "events", "!3")
    state.set(1, "events", 0)
    events.read()
    for index in range(4):
        state.set(index, "xid_seq", "1:13")
    assert {r.subject for r in events.read().readings} == {gpu(2), gpu(3)}


def test_no_driver_is_quiet_here_since_the_other_source_says_it(node: NodeId, tmp_path: Path) -> None:
    seen = NvmlEventSource(str(tmp_path / "none.so.1"), node=node).read()
    assert (seen.readings, seen.error) == ((), "NVML events: LIBRARY_NOT_FOUND")


def test_the_list_names_each_gpus_pci_address(source: NvmlSource) -> None:
    assert [listed.pci for listed in source.read().gpus] == ["0000:18:00", "0000:19:00", "0000:1a:00", "0000:1b:00"]
