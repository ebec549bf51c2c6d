"""Readings as the series that people see in Prometheus: names, labels, base units. Pure; `on_ray.py` hands them to Ray.

What can't be read has no series. Device totals are gauges that rise: only so can the series of a device that is gone be
ended, and Prometheus' `rate` takes their resets as it takes a counter's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType

from tidegate.arbiter.messages import HealthReport
from tidegate.health.readings import Reading, Signal, Status

Series = tuple[str, tuple[tuple[str, str], ...]]
"""A metric's name and its labels, in the order of `LABELS`."""

MOST_XIDS = 32
"""Kinds of XIDs that have a series of their own on one node; what comes after is `other`."""


@dataclass(frozen=True, slots=True)
class Shown:
    name: str
    help: str
    labels: tuple[tuple[str, str], ...] = ()
    """Labels besides node and subject."""


def _gpu(name: str, help_: str, **labels: str) -> Shown:
    return Shown(name, help_, tuple(labels.items()))


_THROTTLE = ("gpu_throttle_seconds_total", "Time that a GPU's clocks were held down.")
_ECC = ("gpu_ecc_errors_total", "Memory errors, by kind and by what they are counted over.")
_ROWS = ("gpu_rows_remapped", "Rows of memory that have been replaced.")
_LINKS = ("gpu_nvlink_errors_total", "NVLink errors, summed over a GPU's links.")
_BYTES = ("ib_port_bytes_total", "Data through a port.")
_PORT = ("ib_port_errors_total", "A port's error counters, raw.")

SHOWN: Mapping[Signal, Shown] = MappingProxyType(
    {
        Signal.GPU_TEMPERATURE: _gpu("gpu_temperature_celsius", "Core temperature of a GPU."),
        Signal.GPU_MEMORY_TEMPERATURE: _gpu("gpu_memory_temperature_celsius", "Temperature of a GPU's memory."),
        Signal.GPU_MARGIN: _gpu("gpu_thermal_margin_celsius", "Degrees left to the slowdown limit."),
        Signal.GPU_TENSOR_ACTIVE: _gpu("gpu_tensor_active_ratio", "Share of time in which a GPU's tensor cores work."),
        Signal.GPU_SM_ACTIVE: _gpu("gpu_sm_active_ratio", "Share of a GPU's multiprocessors that work."),
        Signal.GPU_SM_CLOCK: _gpu("gpu_clock_sm_hertz", "Clock of a GPU's multiprocessors."),
        Signal.GPU_POWER: _gpu("gpu_power_watts", "Power that a GPU draws."),
        Signal.GPU_RECOVERY_ACTION: _gpu("gpu_recovery_action", "The driver's own verdict; 0 is none."),
        Signal.GPU_PCIE_REPLAYS: _gpu("gpu_pcie_replay_total", "PCIe packets that were sent again."),
        Signal.GPU_THROTTLED_POWER_CAP: _gpu(*_THROTTLE, reason="power_cap"),
        Signal.GPU_THROTTLED_SYNC_BOOST: _gpu(*_THROTTLE, reason="sync_boost"),
        Signal.GPU_THROTTLED_SW_THERMAL: _gpu(*_THROTTLE, reason="sw_thermal"),
        Signal.GPU_THROTTLED_HW_THERMAL: _gpu(*_THROTTLE, reason="hw_thermal"),
        Signal.GPU_THROTTLED_POWER_BRAKE: _gpu(*_THROTTLE, reason="power_brake"),
        Signal.GPU_ECC_CORRECTED: _gpu(*_ECC, kind="corrected", scope="volatile"),
        Signal.GPU_ECC_UNCORRECTED: _gpu(*_ECC, kind="uncorrected", scope="volatile"),
        Signal.GPU_ECC_CORRECTED_EVER: _gpu(*_ECC, kind="corrected", scope="aggregate"),
        Signal.GPU_ECC_UNCORRECTED_EVER: _gpu(*_ECC, kind="uncorrected", scope="aggregate"),
        Signal.GPU_ROWS_CORRECTABLE: _gpu(*_ROWS, kind="correctable"),
        Signal.GPU_ROWS_UNCORRECTABLE: _gpu(*_ROWS, kind="uncorrectable"),
        Signal.GPU_ROW_PENDING: _gpu(*_ROWS, kind="pending"),
        Signal.GPU_ROW_FAILURE: _gpu(*_ROWS, kind="failure"),
        Signal.GPU_NVLINK_REPLAYS: _gpu(*_LINKS, kind="replay"),
        Signal.GPU_NVLINK_RECOVERIES: _gpu(*_LINKS, kind="recovery"),
        Signal.GPU_NVLINK_CRC: _gpu(*_LINKS, kind="crc"),
        Signal.GPU_NVLINK_RECOVERIES_FAILED: _gpu(*_LINKS, kind="recovery_failed"),
        Signal.GPU_NVLINK_RECEIVE_ERRORS: _gpu(*_LINKS, kind="receive"),
        Signal.GPU_NVLINK_EFFECTIVE_ERRORS: _gpu(*_LINKS, kind="effective"),
        Signal.IB_PORT_RATE: Shown("ib_port_rate_bits", "Bits per second that a port's link has negotiated."),
        Signal.IB_RECEIVED: Shown(*_BYTES, (("direction", "received"),)),
        Signal.IB_SENT: Shown(*_BYTES, (("direction", "sent"),)),
        **{
            signal: Shown(*_PORT, (("counter", signal.removeprefix("ib_")),))
            for signal in (
                Signal.IB_SYMBOL_ERRORS,
                Signal.IB_LINK_RECOVERIES,
                Signal.IB_LINK_DOWNED,
                Signal.IB_RECEIVE_ERRORS,
                Signal.IB_SEND_DISCARDS,
                Signal.IB_LINK_INTEGRITY,
                Signal.IB_BUFFER_OVERRUNS,
                Signal.IB_PACKET_SEQUENCE_ERRORS,
                Signal.IB_ACK_TIMEOUTS,
                Signal.IB_RNR_RETRIES_EXCEEDED,
                Signal.IB_OUT_OF_SEQUENCE,
                Signal.IB_SLOW_RESTARTS,
                Signal.IB_CARRIER_CHANGES,
            )
        },
    }
)

LABELS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        **{
            shown.name: ("node", "gpu_uuid" if signal.of_gpu else "port", *(name for name, _ in shown.labels))
            for signal, shown in SHOWN.items()
        },
        "ib_port_active": ("node", "port"),
        "gpu_xid_total": ("node", "gpu_uuid", "xid"),
        "rank_step_compute_seconds": ("node", "gpu_uuid", "job"),
        "rank_straggler_score": ("node", "gpu_uuid", "job"),
        "health_reading_status": ("node", "signal", "status"),
        "health_verdict": ("node", "subject", "rule", "verdict"),
        "health_tick_seconds": ("node",),
    }
)
HELP: Mapping[str, str] = MappingProxyType(
    {
        **{shown.name: shown.help for shown in SHOWN.values()},
        "ib_port_active": "1 while a port is up and known to its fabric.",
        "gpu_xid_total": "XIDs that the driver or the kernel has told since the agent started.",
        "rank_step_compute_seconds": "What a rank computes in a step before its collectives.",
        "rank_straggler_score": "The gang's median of that by the rank's own: below 1 it is slower than its peers.",
        "health_reading_status": "How many readings of a signal have this status.",
        "health_verdict": "1 for each verdict that stands.",
        "health_tick_seconds": "Time that one look at a node takes.",
    }
)

_PORT_ACTIVE = 4.0


@dataclass(slots=True)
class XidCount:
    """XIDs so far; at most `MOST_XIDS` kinds of them."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)

    def take(self, readings: Iterable[Reading]) -> None:
        for reading in readings:
            if reading.signal is Signal.GPU_XID and reading.value is not None:
                kinds = {xid for _, xid in self.counts}
                xid = f"{reading.value:.0f}"
                self.counts[reading.subject, xid if xid in kinds or len(kinds) < MOST_XIDS else "other"] += 1


def series_of(report: HealthReport, readings: Iterable[Reading], xids: XidCount, tick_s: float) -> dict[Series, float]:
    """All series that this node has now; whatever is not among them has none."""
    node = ("node", report.node)
    series: dict[Series, float] = {("health_tick_seconds", (node,)): tick_s}
    statuses: Counter[tuple[str, str]] = Counter()
    implausible = {gpu.uuid for gpu in report.gpus if gpu.temperature_celsius is None}
    for reading in readings:
        statuses[reading.signal, reading.status] += 1
        if reading.status is not Status.OK or reading.value is None:
            continue
        if reading.signal is Signal.GPU_TEMPERATURE and reading.subject in implausible:
            continue
        if reading.signal in SHOWN:
            series[_key(reading.signal, reading.node, reading.subject)] = reading.value
        elif reading.signal is Signal.IB_PORT_STATE:
            active = 1.0 if reading.value == _PORT_ACTIVE else 0.0
            series["ib_port_active", (node, ("port", reading.subject))] = active
    for (signal, status), count in statuses.items():
        series["health_reading_status", (node, ("signal", signal), ("status", status))] = float(count)
    for (subject_, xid), count in xids.counts.items():
        series["gpu_xid_total", (node, ("gpu_uuid", subject_), ("xid", xid))] = float(count)
    for gpu in report.gpus:
        rank = (node, ("gpu_uuid", gpu.uuid), ("job", gpu.run or ""))
        if gpu.step_compute_s is not None:
            series["rank_step_compute_seconds", rank] = gpu.step_compute_s
        if gpu.straggler_score is not None:
            series["rank_straggler_score", rank] = gpu.straggler_score
    for verdict in report.verdicts:
        subject_ = verdict.gpu or verdict.node
        labels = (node, ("subject", subject_), ("rule", verdict.rule), ("verdict", str(verdict.action)))
        series["health_verdict", labels] = 1.0
    return series


@lru_cache(maxsize=8192)
def _key(signal: Signal, node: str, subject: str) -> Series:
    """A node has some hundred of them, the same at each look."""
    shown = SHOWN[signal]
    return shown.name, (("node", node), ("gpu_uuid" if signal.of_gpu else "port", subject), *shown.labels)
