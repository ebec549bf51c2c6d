"""One GPU's NVLinks: how many are down, and the sums of their error counters, whatever the generation calls them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pynvml

from tidegate.health.readings import Signal
from tidegate.health.sources.nvml_values import Answer, FieldBatch, cause_of, unsupported

_UP_TO_HOPPER = {
    Signal.GPU_NVLINK_REPLAYS: pynvml.NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY,
    Signal.GPU_NVLINK_RECOVERIES: pynvml.NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY,
    Signal.GPU_NVLINK_CRC: pynvml.NVML_FI_DEV_NVLINK_ERROR_DL_CRC,
}
_BLACKWELL = {
    Signal.GPU_NVLINK_RECOVERIES: pynvml.NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_SUCCESSFUL_EVENTS,
    Signal.GPU_NVLINK_RECOVERIES_FAILED: pynvml.NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS,
    Signal.GPU_NVLINK_RECEIVE_ERRORS: pynvml.NVML_FI_DEV_NVLINK_COUNT_RCV_ERRORS,
    Signal.GPU_NVLINK_EFFECTIVE_ERRORS: pynvml.NVML_FI_DEV_NVLINK_COUNT_EFFECTIVE_ERRORS,
    Signal.GPU_NVLINK_BER: pynvml.NVML_FI_DEV_NVLINK_COUNT_EFFECTIVE_BER,
}
_OLD_SUMS = {
    Signal.GPU_NVLINK_REPLAYS: pynvml.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL,
    Signal.GPU_NVLINK_RECOVERIES: pynvml.NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL,
    Signal.GPU_NVLINK_CRC: pynvml.NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL,
}
"""Already summed over the links: what drivers have that know no counters by link (C140)."""
SIGNALS = (Signal.GPU_NVLINKS, Signal.GPU_NVLINKS_DOWN, *dict.fromkeys((*_UP_TO_HOPPER, *_BLACKWELL)))

_STATE = pynvml.NVML_FI_DEV_NVLINK_GET_STATE
_BER_EXPONENT_BITS = 8


class NvLinks:
    """Asks for what this GPU turned out to have; the first look asks for all."""

    def __init__(self) -> None:
        self._count: int | None = None
        self._per_link: dict[Signal, int] | None = None
        self._sums = dict(_OLD_SUMS)
        self._batch: FieldBatch | None = None
        self._asked: tuple[int, ...] = ()
        self._state_by_call = False

    def read(self, handle: Any) -> tuple[dict[Signal, Answer], str | None]:
        """An answer for each of `SIGNALS`, and the links that are down in words.

        Raises:
            pynvml.NVMLError: the GPU as a whole did not answer.
        """
        if self._count is None:
            (counted,) = FieldBatch([(pynvml.NVML_FI_DEV_NVLINK_LINK_COUNT, 0)]).read(handle)
            if isinstance(counted, str):
                return dict.fromkeys(SIGNALS, counted), None
            self._count = int(counted)
        answers: dict[Signal, Answer] = dict.fromkeys(SIGNALS, "NOT_SUPPORTED")
        answers[Signal.GPU_NVLINKS] = float(self._count)
        if self._count == 0:
            return answers, None  # a card without NVLink: no link is down (C139)
        counters = self._per_link if self._per_link is not None else {**_UP_TO_HOPPER, **_BLACKWELL}
        # On a generation that has both numbers, recoveries are those of Blackwell.
        first = self._per_link is None
        columns = self._columns(handle, [_STATE, *counters.values()] if not first else _all_ids())
        states = columns.pop(_STATE)
        if first:
            counters = {
                signal: field_id
                for family in (_UP_TO_HOPPER, _BLACKWELL)
                for signal, field_id in family.items()
                if not all(unsupported(answer) for answer in columns[field_id])
            }
            self._per_link = counters
        if all(unsupported(state) for state in states):
            states = self._states_by_call(handle)
        down, detail = _down(states)
        answers[Signal.GPU_NVLINKS_DOWN] = down
        for signal, field_id in counters.items():
            answers[signal] = _worst(columns[field_id]) if signal is Signal.GPU_NVLINK_BER else _sum(columns[field_id])
        if not counters and self._sums:
            answers |= self._old_sums(handle)
        return answers, detail

    def _columns(self, handle: Any, ids: Sequence[int]) -> dict[int, list[Answer]]:
        """Each field of each link, in one trip."""
        assert self._count is not None
        if self._batch is None or self._asked != tuple(ids):
            self._asked = tuple(ids)
            self._batch = FieldBatch([(field_id, link) for field_id in ids for link in range(self._count)])
        found = self._batch.read(handle)
        return {field_id: found[i * self._count : (i + 1) * self._count] for i, field_id in enumerate(ids)}

    def _states_by_call(self, handle: Any) -> list[Answer]:
        assert self._count is not None
        states: list[Answer] = []
        for link in range(self._count):
            try:
                states.append(float(pynvml.nvmlDeviceGetNvLinkState(handle, link)))
            except pynvml.NVMLError as error:
                states.append(cause_of(error))
        return states

    def _old_sums(self, handle: Any) -> dict[Signal, Answer]:
        found = FieldBatch([(field_id, 0) for field_id in self._sums.values()]).read(handle)
        answers = dict(zip(self._sums, found, strict=True))
        self._sums = {signal: self._sums[signal] for signal, answer in answers.items() if not unsupported(answer)}
        return answers


def bit_error_ratio(encoded: float) -> float:
    """NVLink 5 writes a ratio as mantissa and exponent: the low 8 bits are the exponent n, the 4 above them m, for
    m × 10^-n (nvml.h, NVML_NVLINK_ERROR_COUNTER_BER_GET)."""
    bits = int(encoded)
    return float((bits >> _BER_EXPONENT_BITS) & 0xF) * 10.0 ** -(bits & 0xFF)


def _all_ids() -> list[int]:
    return [_STATE, *_UP_TO_HOPPER.values(), *_BLACKWELL.values()]


def _down(states: Sequence[Answer]) -> tuple[Answer, str | None]:
    """How many links are inactive. A state that can't be read is neither up nor down: then nothing is known."""
    for state in states:
        if isinstance(state, str):
            return state, None
    inactive = [link for link, state in enumerate(states) if state == pynvml.NVML_NVLINK_STATE_INACTIVE]
    detail = "links " + ", ".join(map(str, inactive)) + " are inactive" if inactive else None
    return float(len(inactive)), detail


def _sum(column: Sequence[Answer]) -> Answer:
    """Over all links, or over none: a sum that lacks a link would look like a reset when the link is back."""
    values = [answer for answer in column if not isinstance(answer, str)]
    return sum(values) if len(values) == len(column) else next(a for a in column if isinstance(a, str))


def _worst(column: Sequence[Answer]) -> Answer:
    values = [bit_error_ratio(answer) for answer in column if not isinstance(answer, str)]
    return max(values) if values else next(answer for answer in column if isinstance(answer, str))
