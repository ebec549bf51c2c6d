"""Time as an argument: what needs the time is given a Clock."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since the Unix epoch, comparable between machines whose clocks are in step."""

    def now_s(self) -> float: ...


class SystemClock:
    """The machine's clock."""

    def now_s(self) -> float:
        return time.time()
