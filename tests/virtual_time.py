"""An event loop whose time passes only while nothing is to be done: a second's wait takes no time, and what happens in
it is the same on any machine.

Only for stories that are wholly in the loop: while a thread, a process or a socket works, its clock would run on.
"""

from __future__ import annotations

import asyncio
import selectors

TURNS_MAX = 10_000
"""Turns of the loop without a pause after which it is a hot one, whose time would never pass."""


class _Skipping(selectors.DefaultSelector):
    now_s = 0.0
    turns = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if timeout is None and not ready:
            raise RuntimeError("nothing will ever happen in this loop any more")
        if ready or not timeout:
            self.turns += 1
            if self.turns > TURNS_MAX:
                raise RuntimeError(f"a hot loop: {TURNS_MAX} turns without a pause")
            return ready
        self.now_s += timeout
        self.turns = 0
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._skipping = _Skipping()
        super().__init__(self._skipping)

    def time(self) -> float:
        return self._skipping.now_s


async def passes(seconds: float) -> None:
    """So much of the loop's time."""
    assert isinstance(asyncio.get_running_loop(), VirtualTimeLoop), "this would be real waiting"
    await asyncio.sleep(seconds)
