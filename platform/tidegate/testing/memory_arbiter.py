"""An arbiter that only listens, for agents under test."""

from __future__ import annotations

from tidegate.arbiter.messages import HealthReport, Seat
from tidegate.errors import NoArbiterError
from tidegate.ids import GpuId


class MemoryArbiter:
    """Keeps the health reports it was sent; `away` makes it answer as if nobody were there."""

    def __init__(self) -> None:
        self.health: list[HealthReport] = []
        self.asked = 0
        """Reports that were sent to it, away or not."""
        self.away = False
        self.seats: dict[GpuId, Seat] = {}
        """What it answers."""

    async def report_health(self, report: HealthReport) -> dict[GpuId, Seat]:
        self.asked += 1
        if self.away:
            raise NoArbiterError("away")
        self.health.append(report)
        return self.seats
