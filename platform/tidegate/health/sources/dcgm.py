"""A dcgm-exporter that runs already: the fields that NVML has not got on older GPUs, tensor activity first of all.

It is scraped, never started: one profiler at a time may watch an Ampere GPU. By default it samples once in 30 s, too
slow for temperature, which is NVML's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tidegate.clock import Clock, SystemClock
from tidegate.health.readings import Reading, Round, Signal, Status
from tidegate.health.sources.saying import Voice
from tidegate.ids import NodeId

logger = logging.getLogger(__name__)

URL = "http://127.0.0.1:9400/metrics"
TIMEOUT_S = 5.0

_BLANK_AT = 9.2e18
"""0x7ffffffffffffff0 to …f3 are "blank", "not found", "not supported", "no permission"; as floats they are one number
(dcgm_structs.h, C107)."""
_BLANK_INT32 = frozenset(float(n) for n in range(0x7FFFFFF0, 0x7FFFFFF4))
_BLANK_FP64 = frozenset(float(n) for n in range(140737488355328, 140737488355332))


@dataclass(frozen=True, slots=True)
class _Field:
    signal: Signal
    times: float = 1.0
    """From DCGM's unit to ours."""
    up_to: float = float("inf")
    """The highest value, in DCGM's unit, that can be true."""
    of_instance: bool = False
    """Under MIG each instance has its own; the others repeat the whole GPU's value on each instance's line."""


def _ratio(signal: Signal, up_to: float = 1.0) -> _Field:
    return _Field(signal, 1.0 / up_to, up_to, of_instance=True)


FIELDS: Mapping[str, _Field] = {
    "DCGM_FI_DEV_GPU_TEMP": _Field(Signal.GPU_TEMPERATURE, up_to=300),
    "DCGM_GPU_TEMP": _Field(Signal.GPU_TEMPERATURE, up_to=300),
    "DCGM_FI_DEV_MEMORY_TEMP": _Field(Signal.GPU_MEMORY_TEMPERATURE, up_to=300),
    "DCGM_FI_DEV_GPU_TEMP_LIMIT": _Field(Signal.GPU_MARGIN, up_to=300),
    "DCGM_FI_DEV_SM_CLOCK": _Field(Signal.GPU_SM_CLOCK, 1e6, 10_000),
    "DCGM_FI_DEV_MEM_CLOCK": _Field(Signal.GPU_MEMORY_CLOCK, 1e6, 20_000),
    "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS": _Field(Signal.GPU_CLOCK_REASONS, up_to=2**32),
    "DCGM_FI_DEV_CLOCKS_EVENT_REASONS": _Field(Signal.GPU_CLOCK_REASONS, up_to=2**32),
    # Nanoseconds, whatever the exporter's help text says (C116).
    "DCGM_FI_DEV_POWER_VIOLATION": _Field(Signal.GPU_THROTTLED_POWER_CAP, 1e-9),
    "DCGM_FI_DEV_THERMAL_VIOLATION": _Field(Signal.GPU_THROTTLED_SW_THERMAL, 1e-9),
    "DCGM_FI_DEV_SYNC_BOOST_VIOLATION": _Field(Signal.GPU_THROTTLED_SYNC_BOOST, 1e-9),
    "DCGM_FI_DEV_POWER_USAGE": _Field(Signal.GPU_POWER, up_to=10_000),
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": _Field(Signal.GPU_ENERGY, 1e-3),
    "DCGM_FI_DEV_PCIE_REPLAY_COUNTER": _Field(Signal.GPU_PCIE_REPLAYS),
    "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS": _Field(Signal.GPU_ROWS_CORRECTABLE),
    "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS": _Field(Signal.GPU_ROWS_UNCORRECTABLE),
    "DCGM_FI_DEV_ROW_REMAP_FAILURE": _Field(Signal.GPU_ROW_FAILURE, up_to=1),
    "DCGM_FI_DEV_ROW_REMAP_PENDING": _Field(Signal.GPU_ROW_PENDING, up_to=1),
    "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL": _Field(Signal.GPU_ECC_CORRECTED),
    "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": _Field(Signal.GPU_ECC_UNCORRECTED),
    "DCGM_FI_DEV_ECC_SBE_AGG_TOTAL": _Field(Signal.GPU_ECC_CORRECTED_EVER),
    "DCGM_FI_DEV_ECC_DBE_AGG_TOTAL": _Field(Signal.GPU_ECC_UNCORRECTED_EVER),
    "DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL": _Field(Signal.GPU_NVLINK_REPLAYS),
    "DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL": _Field(Signal.GPU_NVLINK_RECOVERIES),
    "DCGM_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL": _Field(Signal.GPU_NVLINK_CRC),
    # Typed as a counter, yet a rate in MB/s that goes down (C114).
    "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL": _Field(Signal.GPU_NVLINK_RATE, 1e6),
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": _ratio(Signal.GPU_TENSOR_ACTIVE),
    "DCGM_FI_PROF_SM_ACTIVE": _ratio(Signal.GPU_SM_ACTIVE),
    "DCGM_FI_PROF_DRAM_ACTIVE": _ratio(Signal.GPU_DRAM_ACTIVE),
    "DCGM_FI_DEV_GPU_UTIL": _ratio(Signal.GPU_UTILIZATION, 100.0),
    "DCGM_GPU_UTILIZATION": _ratio(Signal.GPU_UTILIZATION, 100.0),
    "DCGM_FI_DEV_FB_USED": _Field(Signal.GPU_MEMORY_USED, 2**20, 2**24, of_instance=True),
    "DCGM_FI_PROF_PCIE_TX_BYTES": _Field(Signal.GPU_PCIE_SENT),
    "DCGM_FI_PROF_PCIE_RX_BYTES": _Field(Signal.GPU_PCIE_RECEIVED),
    "DCGM_FI_PROF_NVLINK_TX_BYTES": _Field(Signal.GPU_NVLINK_SENT),
    "DCGM_FI_PROF_NVLINK_RX_BYTES": _Field(Signal.GPU_NVLINK_RECEIVED),
    "DCGM_FI_DEV_GET_GPU_RECOVERY_ACTION": _Field(Signal.GPU_RECOVERY_ACTION, up_to=7),
}
"""Exported names, in upper case as relabelled ones are compared (C120), old ones too."""

_LAST_XID = frozenset({"DCGM_FI_DEV_XID_ERRORS", "DCGM_XID_ERRORS"})
_XID_COUNTS = frozenset({"DCGM_EXP_XID_ERRORS_COUNT", "DCGM_FI_DEV_XID_ERRORS_ACTIVE"})
_SENTINEL, _RANGE = "NO_VALUE", "IMPLAUSIBLE"


class DcgmSource:
    """Scrapes one exporter. Under MIG the subject of what each instance has for itself is `UUID/instance` (C117)."""

    def __init__(
        self, url: str = URL, *, node: NodeId, clock: Clock | None = None, timeout_s: float = TIMEOUT_S
    ) -> None:
        self._url = url
        self._voice = Voice(node, clock if clock is not None else SystemClock())
        self._client = httpx.Client(timeout=timeout_s, trust_env=False)
        self._xids: dict[tuple[str, str], float] | None = None
        self._fields: frozenset[str] = frozenset()
        self.bad_lines = 0
        """Lines so far that no parser can read; the rest of their page was."""

    def read(self) -> Round:
        """One scrape."""
        try:
            answer = self._client.get(self._url)
            answer.raise_for_status()
        except httpx.ConnectError:
            # Nobody exports here: the source is optional.
            return self._failed(Status.UNSUPPORTED, "NO_EXPORTER")
        except httpx.TimeoutException:
            return self._failed(Status.TIMEOUT, "TIMEOUT")
        except httpx.HTTPError as error:
            return self._failed(Status.STALE, type(error).__name__)
        samples = [sample for sample in self._samples(answer.text) if _uuid(sample)]
        self._note_schema(samples)
        answers = self._voice.value(self._voice.node, Signal.DCGM_ANSWERS, 1.0)
        readings = {(reading.subject, reading.signal): reading for reading in self._values(samples)}
        return Round(readings=(answers, *readings.values(), *self._new_xids(samples)))

    def close(self) -> None:
        self._client.close()

    def _failed(self, status: Status, cause: str) -> Round:
        answers = self._voice.missing(self._voice.node, Signal.DCGM_ANSWERS, status, cause)
        return Round(readings=(answers,), error=f"dcgm-exporter: {self._url}: {cause}")

    def _samples(self, text: str) -> Iterator[Sample]:
        try:
            yield from [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        except ValueError:
            # One bad line would cost the page (C119): then each is read by itself.
            for line in text.splitlines():
                if line and not line.startswith("#"):
                    try:
                        yield from [s for family in text_string_to_metric_families(line + "\n") for s in family.samples]
                    except ValueError:
                        self.bad_lines += 1

    def _note_schema(self, samples: list[Sample]) -> None:
        """A field that an upgrade took away is said once; the GPU is as well as its other fields say (C110)."""
        now = frozenset(_name(sample) for sample in samples)
        if gone := sorted((self._fields - now) & FIELDS.keys()):
            logger.warning("dcgm-exporter: no longer exports %s", ", ".join(gone))
        self._fields = now

    def _values(self, samples: list[Sample]) -> Iterator[Reading]:
        for sample in samples:
            wanted = FIELDS.get(_name(sample))
            if wanted is None:
                continue
            subject = _uuid(sample)
            instance = _label(sample, "gpu_i_id")
            if instance and wanted.of_instance:
                subject = f"{subject}/{instance}"
            if _blank(sample.value):
                yield self._voice.missing(subject, wanted.signal, Status.UNSUPPORTED, _SENTINEL)
            elif wanted.signal is Signal.GPU_MEMORY_TEMPERATURE and sample.value == 0:
                yield self._voice.missing(subject, wanted.signal, Status.UNSUPPORTED, _SENTINEL)  # no such sensor
            elif not (0 <= sample.value <= wanted.up_to or wanted.signal is Signal.GPU_MARGIN):
                yield self._voice.missing(subject, wanted.signal, Status.STALE, _RANGE, detail=f"{sample.value:g}")
            else:
                yield self._voice.value(subject, wanted.signal, sample.value * wanted.times)

    def _new_xids(self, samples: list[Sample]) -> list[Reading]:
        """XIDs that weren't there at the last scrape. The gauge keeps the last one for ever, so only a change is an
        event, and the second of two equal ones shows only in the counting metric, if that is exported (C111)."""
        seen: dict[tuple[str, str], float] = {}
        events: list[Reading] = []
        before = self._xids
        for sample in samples:
            name, subject = _name(sample), _uuid(sample)
            if _blank(sample.value) or name not in _LAST_XID | _XID_COUNTS:
                continue
            if name in _LAST_XID:
                key, xid = (subject, "last"), sample.value
                is_new = before is not None and sample.value != before.get(key)
            elif (label := _label(sample, "xid")).isdigit():
                key, xid = (subject, label), float(label)
                is_new = before is not None and sample.value > before.get(key, 0.0)
            else:
                continue
            seen[key] = sample.value
            if is_new and xid > 0:
                events.append(self._voice.value(subject, Signal.GPU_XID, xid, detail="told by dcgm-exporter"))
        self._xids = seen
        return list({(event.subject, event.value): event for event in events}.values())


def _blank(value: float) -> bool:
    return value != value or value >= _BLANK_AT or value in _BLANK_INT32 or value in _BLANK_FP64


def _name(sample: Sample) -> str:
    """The exported name; the parser hangs a `_total` on what is typed as a counter."""
    name = sample.name.upper()
    return name if name in FIELDS else name.removesuffix("_TOTAL")


def _label(sample: Sample, name: str) -> str:
    """A label whatever its case; an empty one is as good as none (C120)."""
    return next((text for label, text in sample.labels.items() if label.lower() == name), "")


def _uuid(sample: Sample) -> str:
    return _label(sample, "uuid") or _label(sample, "gpu_uuid")
