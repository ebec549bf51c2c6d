"""Wait for a condition, not for a time."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], deadline_s: float, what: str) -> None:
    """Return as soon as `condition()` is true; fail after `deadline_s` seconds and say what did not happen."""
    ends_s = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > ends_s:
            raise AssertionError(f"not within {deadline_s:g} s: {what}")
        time.sleep(0.01)


async def until(condition: Callable[[], object], deadline_s: float, what: str) -> None:
    """As `wait_until`, while the event loop goes on; `condition` may be a coroutine function."""
    ends_s = time.monotonic() + deadline_s
    while not (await met if inspect.isawaitable(met := condition()) else met):
        if time.monotonic() > ends_s:
            raise AssertionError(f"not within {deadline_s:g} s: {what}")
        await asyncio.sleep(0.001)


async def others_first() -> None:
    """Whatever else is ready in the event loop has its turn."""
    await asyncio.sleep(0)
