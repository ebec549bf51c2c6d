"""A rank's heartbeat: a few numbers in shared memory that the rank writes and its node agent reads.

No message is sent in a step. Writing costs about a microsecond.
"""

from __future__ import annotations

import math
import time
from collections.abc import MutableSequence

from tidegate.gang.plan import RankBeat
from tidegate.processes import state_of
from tidegate.train.progress import Phase

FIELDS = 12
_STEP, _PHASE, _MOVED_AT_S, _MOVED_STEADY_S, _LOSS, _COMMITTED = range(6)
_STOP, _FIRST_STEP, _FIRST_AT_S, _SPEED, _MFU, _COMPUTE = range(6, FIELDS)
_PHASES = tuple(Phase)


def clear(cells: MutableSequence[float]) -> None:
    """Before a rank starts."""
    cells[_STEP], cells[_COMMITTED], cells[_LOSS], cells[_STOP] = -1.0, -1.0, math.nan, 0.0
    cells[_FIRST_STEP], cells[_FIRST_AT_S] = -1.0, 0.0
    cells[_SPEED], cells[_MFU], cells[_COMPUTE] = math.nan, math.nan, math.nan
    cells[_PHASE] = _PHASES.index(Phase.STARTING)
    cells[_MOVED_AT_S], cells[_MOVED_STEADY_S] = time.time(), time.monotonic()


def ask_to_stop(cells: MutableSequence[float]) -> None:
    cells[_STOP] = 1.0


def read(cells: MutableSequence[float], rank: int, pid: int, exit_code: int | None) -> RankBeat:
    return RankBeat(
        rank=rank,
        pid=pid,
        exit_code=exit_code,
        step=int(cells[_STEP]),
        first_step=int(cells[_FIRST_STEP]),
        first_step_at_s=cells[_FIRST_AT_S],
        phase=str(_PHASES[int(cells[_PHASE])]),
        # A steady clock: a step of the wall clock must not look like a hang.
        idle_s=time.monotonic() - cells[_MOVED_STEADY_S],
        progress_at_s=cells[_MOVED_AT_S],
        loss=_known(cells[_LOSS]),
        images_per_s=_known(cells[_SPEED]),
        mfu=_known(cells[_MFU]),
        compute_s=_known(cells[_COMPUTE]),
        committed_step=int(cells[_COMMITTED]),
        stopping=cells[_STOP] != 0.0,
        process_state=state_of(pid) if exit_code is None else "",
    )


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


class SharedProgress:
    """`tidegate.train.progress.Progress` over such cells."""

    def __init__(self, cells: MutableSequence[float]) -> None:
        self._cells = cells

    def phase(self, phase: Phase) -> None:
        self._cells[_PHASE] = _PHASES.index(phase)
        self._moved()

    def stepped(self, step: int, loss: float) -> None:
        self._cells[_LOSS] = loss
        if self._cells[_FIRST_STEP] < 0:
            self._cells[_FIRST_AT_S] = time.time()
            self._cells[_FIRST_STEP] = step
        self._cells[_STEP] = step
        self._moved()

    def speed(self, images_per_s: float, mfu: float | None) -> None:
        self._cells[_SPEED] = images_per_s
        self._cells[_MFU] = math.nan if mfu is None else mfu

    def computed(self, seconds: float) -> None:
        self._cells[_COMPUTE] = seconds

    def committed(self, step: int) -> None:
        self._cells[_COMMITTED] = step

    def stop_requested(self) -> bool:
        return self._cells[_STOP] != 0.0

    def _moved(self) -> None:
        self._cells[_MOVED_STEADY_S] = time.monotonic()
        self._cells[_MOVED_AT_S] = time.time()
