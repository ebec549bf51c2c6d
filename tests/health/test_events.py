"""One XID from several tellers, the newest value from several sources, and the series that people see."""

from __future__ import annotations

import pytest

from tidegate.arbiter.messages import Action, GpuSeen, HealthReport, Verdict, When
from tidegate.health.events import HOLD_S, EventFilter, named
from tidegate.health.latest import Latest
from tidegate.health.readings import SLOW_S, ListedGpu, Reading, Signal, Status
from tidegate.health.series import LABELS, MOST_XIDS, XidCount, series_of
from tidegate.ids import GpuId, NodeId, Tier

NODE = NodeId("n1")
GPU = GpuId("GPU-1")


def xid(number: int, subject: str = GPU, detail: str | None = None) -> Reading:
    return reading(Signal.GPU_XID, float(number), subject=subject, detail=detail)


def reading(
    signal: Signal, value: float | None, *, subject: str = GPU, detail: str | None = None, at_s: float = 0.0
) -> Reading:
    status = Status.OK if value is not None else Status.UNSUPPORTED
    return Reading(at_s=at_s, node=NODE, subject=subject, signal=signal, value=value, status=status, detail=detail)


def admit(events: EventFilter, now_s: float, *told: tuple[str, Reading], kernel: bool = True) -> list[Reading]:
    lags = {"kmsg": 5.0, "nvml-events": 5.0, "dcgm": 60.0}
    return events.admit([(feed, lags[feed], r) for feed, r in told], kernel_answers=kernel, now_s=now_s)


def test_the_kernels_line_is_the_event_and_nvml_is_its_echo() -> None:
    events = EventFilter()
    line = xid(145, detail="RLW_REMAP Nonfatal XC0 i0 Link 00")
    assert admit(events, 100.0, ("nvml-events", xid(145))) == [], "the kernel's line may still come, with its words"
    assert admit(events, 101.0, ("kmsg", line)) == [line]
    assert admit(events, 102.0) == []
    assert admit(events, 104.0, ("nvml-events", xid(145))) == []
    assert admit(events, 105.9) == []


def test_what_only_nvml_tells_comes_a_moment_later_and_at_once_without_a_kernel_log() -> None:
    events = EventFilter()
    assert admit(events, 100.0, ("nvml-events", xid(62))) == []
    assert admit(events, 101.0) == []
    assert admit(events, 100.0 + HOLD_S) == [xid(62)]
    assert admit(events, 103.0) == [], "once"
    blind = EventFilter()
    assert admit(blind, 100.0, ("nvml-events", xid(62)), kernel=False) == [xid(62)]


def test_both_at_the_same_look_are_one_and_the_kernels_whatever_their_order() -> None:
    line = xid(79, detail="GPU has fallen off the bus")
    for told in ((("nvml-events", xid(79)), ("kmsg", line)), (("kmsg", line), ("nvml-events", xid(79)))):
        assert admit(EventFilter(), 100.0, *told) == [line]


def test_two_lines_of_the_kernel_log_are_two_events() -> None:
    """One NVLink XID may be fatal and the next of the same number not."""
    events = EventFilter()
    first, second = xid(144, detail="SAW_MVB Nonfatal"), xid(144, detail="SAW_MVB Fatal")
    assert admit(events, 100.0, ("kmsg", first), ("kmsg", second)) == [first, second]


@pytest.mark.parametrize(("later_s", "counted"), [(0.5, 1), (299.0, 1), (301.0, 2)])
def test_c144_a_fall_off_the_bus_counts_once_however_it_is_told(later_s: float, counted: int) -> None:
    events = EventFilter()
    told = admit(events, 100.0, ("kmsg", xid(79, detail="GPU has fallen off the bus")))
    told += admit(events, 100.0 + later_s, ("kmsg", xid(79, detail="fallen off the bus, without an XID")))
    assert len(told) == counted


def test_c111_an_exporter_that_is_half_a_minute_late_tells_nothing_new() -> None:
    events = EventFilter()
    assert admit(events, 100.0, ("kmsg", xid(31)))
    assert admit(events, 140.0, ("dcgm", xid(31))) == []
    assert admit(events, 145.0) == []
    assert admit(events, 400.0, ("dcgm", xid(31))) == []
    assert admit(events, 402.0) == [xid(31)], "long after it is another one"


def test_c113_an_xid_that_the_exporter_hides_comes_from_the_kernel_log() -> None:
    events = EventFilter()
    told = admit(events, 100.0, ("kmsg", xid(62)), ("kmsg", xid(45)))
    told += admit(events, 120.0, ("dcgm", xid(45)))
    assert [event.value for event in told] == [62, 45]


def test_c104_a_kernel_line_finds_its_gpu_by_address_and_never_by_number() -> None:
    gpus = (ListedGpu(uuid=GpuId("GPU-a"), index=0, pci="0000:9b:00"), ListedGpu(uuid=GPU, index=1, pci="0000:18:00"))
    assert named(xid(79, subject="pci:0000:18:00"), gpus).subject == GPU
    stranger = xid(79, subject="pci:0000:44:00")
    assert named(stranger, gpus) is stranger
    card = reading(Signal.NIC_HOT, 1.0, subject="pci:0000:18:00")
    assert named(card, gpus) is card


# The newest of everything


def test_the_better_source_wins_while_it_has_a_fresh_value() -> None:
    latest = Latest(period_s=1.0)
    now, old = reading(Signal.GPU_TEMPERATURE, 60.0), reading(Signal.GPU_TEMPERATURE, 82.0)
    latest.take([now], "nvml", 0, 100.0)
    assert latest.take([old], "dcgm", 5, 101.0) == [], "an exporter's temperature is half a minute old"
    assert latest.value(GPU, Signal.GPU_TEMPERATURE, 101.0, frozenset()) == 60.0
    assert latest.take([old], "dcgm", 5, 110.0) == [old], "NVML has been silent"


def test_what_nvml_has_not_got_comes_from_the_exporter() -> None:
    latest = Latest(period_s=1.0)
    none, some = reading(Signal.GPU_TENSOR_ACTIVE, None), reading(Signal.GPU_TENSOR_ACTIVE, 0.93)
    latest.take([none], "nvml", 0, 100.0)
    assert latest.take([some], "dcgm", 5, 100.5) == [some]
    for second in range(101, 130):
        assert latest.take([none], "nvml", 0, float(second)) == []
        assert latest.value(GPU, Signal.GPU_TENSOR_ACTIVE, float(second), frozenset()) == 0.93
    assert latest.value(GPU, Signal.GPU_TENSOR_ACTIVE, 131.0, frozenset()) is None, "the exporter has gone"


def test_an_old_value_is_shown_to_nobody_and_a_slow_one_is_not_old() -> None:
    latest = Latest(period_s=1.0)
    hot, slow = reading(Signal.GPU_TEMPERATURE, 60.0), reading(Signal.GPU_ROW_PENDING, 0.0)
    latest.take([hot, slow], "nvml", 0, 100.0)
    assert list(latest.fresh(101.0, frozenset({"nvml"}))) == [], "nothing of a source that does not answer"
    assert list(latest.fresh(102.5, frozenset())) == [slow]
    assert list(latest.fresh(100.0 + 2 * SLOW_S, frozenset())) == [slow]
    latest.forget(101.0)
    assert latest.everything() == []


# Series


def report(*verdicts: Verdict, celsius: float | None = 61.0) -> HealthReport:
    return HealthReport(
        node=NODE, at_s=0.0, gpus=(GpuSeen(uuid=GPU, index=0, temperature_celsius=celsius),), verdicts=verdicts
    )


def test_a_value_has_its_series_in_base_units_and_what_is_missing_has_none() -> None:
    readings = [
        reading(Signal.GPU_TEMPERATURE, 61.0),
        reading(Signal.GPU_SM_CLOCK, 1980e6),
        reading(Signal.GPU_THROTTLED_HW_THERMAL, 1.5),
        reading(Signal.GPU_MEMORY_TEMPERATURE, None),
        reading(Signal.IB_PORT_STATE, 4.0, subject="mlx5_0/1"),
        reading(Signal.IB_PORT_STATE, 1.0, subject="mlx5_1/1"),
        reading(Signal.IB_RECEIVED, 4000.0, subject="mlx5_0/1"),
        reading(Signal.IB_LINK_DOWNED, 255.0, subject="mlx5_0/1"),
    ]
    series = series_of(report(), readings, XidCount(), 0.01)
    node, gpu, port = ("node", NODE), ("gpu_uuid", GPU), ("port", "mlx5_0/1")
    assert series["gpu_temperature_celsius", (node, gpu)] == 61.0
    assert series["gpu_clock_sm_hertz", (node, gpu)] == 1980e6
    assert series["gpu_throttle_seconds_total", (node, gpu, ("reason", "hw_thermal"))] == 1.5
    assert series["ib_port_active", (node, port)] == 1.0
    assert series["ib_port_active", (node, ("port", "mlx5_1/1"))] == 0.0
    assert series["ib_port_bytes_total", (node, port, ("direction", "received"))] == 4000.0
    assert series["ib_port_errors_total", (node, port, ("counter", "link_downed"))] == 255.0
    assert not [key for key in series if key[0] == "gpu_memory_temperature_celsius"]
    status = ("health_reading_status", (node, ("signal", "gpu_memory_temperature_celsius"), ("status", "unsupported")))
    assert series[status] == 1.0


def test_c184_a_failed_read_omits_the_series_and_never_writes_a_number() -> None:
    """A counter's reset must stay visible: 20289, nothing, 0."""
    story = []
    for value in (20289.37, None, 0.0):
        series = series_of(report(), [reading(Signal.GPU_PCIE_REPLAYS, value)], XidCount(), 0.01)
        story.append([found for (name, _), found in series.items() if name == "gpu_pcie_replay_total"])
    assert story == [[20289.37], [], [0.0]]


def test_an_impossible_temperature_is_shown_to_nobody() -> None:
    series = series_of(report(celsius=None), [reading(Signal.GPU_TEMPERATURE, 255.0)], XidCount(), 0.01)
    assert not [key for key in series if key[0] == "gpu_temperature_celsius"]


def test_c181_c183_labels_are_bounded_when_they_are_recorded() -> None:
    xids = XidCount()
    xids.take([xid(number) for number in range(1, 1000)])
    xids.take([xid(1), xid(5000)])
    kinds = {kind for _, kind in xids.counts}
    assert len(kinds) == MOST_XIDS + 1
    assert xids.counts[GPU, "1"] == 2
    assert xids.counts[GPU, "other"] == 1000 - 1 - MOST_XIDS + 1
    series = series_of(report(), [], xids, 0.01)
    assert len([key for key in series if key[0] == "gpu_xid_total"]) == MOST_XIDS + 1


def test_a_verdict_is_a_series_while_it_stands() -> None:
    verdict = Verdict(
        at_s=0.0,
        node=NODE,
        gpu=GPU,
        rule="temperature",
        action=Action.EVICT_GPU,
        when=When.NOW,
        tier=Tier.SERVE,
        evidence="79 °C",
        ends="it is cool",
    )
    key = ("health_verdict", (("node", NODE), ("subject", GPU), ("rule", "temperature"), ("verdict", "evict_gpu")))
    assert series_of(report(verdict), [], XidCount(), 0.01)[key] == 1.0
    assert key not in series_of(report(), [], XidCount(), 0.01)


def test_every_series_has_the_labels_that_its_metric_declares() -> None:
    readings = [reading(signal, 4.0) for signal in Signal]
    xids = XidCount()
    xids.take(readings)
    for name, labels in series_of(report(), readings, xids, 0.01):
        assert tuple(label for label, _ in labels) == LABELS[name], name
