"""How a source says what it saw: the readings of one node, all made the same way."""

from __future__ import annotations

import errno

from tidegate.clock import Clock
from tidegate.health.readings import Reading, Signal, Status
from tidegate.ids import NodeId


class Voice:
    """Makes readings of one node, at the time of its clock."""

    def __init__(self, node: NodeId, clock: Clock) -> None:
        self.node = node
        self.clock = clock

    def value(
        self, subject: str, signal: Signal, value: float, *, detail: str | None = None, at_s: float | None = None
    ) -> Reading:
        when_s = self.clock.now_s() if at_s is None else at_s
        return Reading(when_s, self.node, subject, signal, float(value), Status.OK, None, detail)

    def missing(
        self, subject: str, signal: Signal, status: Status, cause: str, *, detail: str | None = None
    ) -> Reading:
        return Reading(
            at_s=self.clock.now_s(),
            node=self.node,
            subject=subject,
            signal=signal,
            value=None,
            status=status,
            cause=cause,
            detail=detail,
        )


class Every:
    """Due the first time that it is asked, then once each period. A clock that was set back makes it due at once."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._last_s: float | None = None

    def due(self, now_s: float) -> bool:
        # Half a tick of slack would drift; a tenth of the period lets the slower rounds keep step with the agent's.
        if self._last_s is not None and 0 <= now_s - self._last_s < 0.9 * self._period_s:
            return False
        self._last_s = now_s
        return True


def cause_of(error: OSError) -> str:
    """The system's own name of an error, e.g. ENOENT."""
    return errno.errorcode.get(error.errno or 0, type(error).__name__)
