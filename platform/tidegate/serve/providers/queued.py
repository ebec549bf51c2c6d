"""Providers that take a request now and are asked after it later: one walk for all of them.

Submit, look until it is done, fetch the pictures. Who stops waiting (deadline, client gone) cancels, and only a cancel
that proves that the work never began makes it a refusal; whatever else happened may have been charged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from tidegate.serve.providers.base import ProviderAmbiguousError, ProviderError, ProviderRefusedError
from tidegate.serve.providers.wire import Wire
from tidegate.serve.work import ImageJob, Made

LOOK_FIRST_S = 0.05
LOOK_MAX_S = 1.0
"""Between two looks: from the first, half as long again each time, to the second."""

CANCEL_S = 1.0
"""Kept back from an attempt's time (a tenth of it at most) for the cancel and its answer."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request that was taken."""

    id: str
    look_url: str
    cancel_url: str
    result_url: str = ""


class QueueFace(Protocol):
    """What differs between such providers. Each raises the two errors of `base`, and nothing else."""

    async def submit(self, job: ImageJob, *, timeout_s: float, now_s: float) -> Ticket: ...

    async def look(self, ticket: Ticket, now_s: float) -> tuple[str, ...] | None:
        """URLs of its pictures once it is done; None while it isn't, or while nobody can say."""

    async def cancel(self, ticket: Ticket) -> bool:
        """Ask to stop. True where the answer proves that the work never began: nothing is charged."""


class Queued:
    """Walks one provider's requests. Cancels of clients that left go on in the background."""

    def __init__(self, wire: Wire, face: QueueFace) -> None:
        self._wire, self._face = wire, face
        self._background: set[asyncio.Task[Any]] = set()

    async def make(self, job: ImageJob, *, timeout_s: float, now_s: float) -> Made:
        cancel_s = min(CANCEL_S, timeout_s / 10)
        # A task of its own: left half-way, its answer would never tell which request to cancel.
        submitting = self._start(self._face.submit(job, timeout_s=timeout_s, now_s=now_s))
        try:
            async with asyncio.timeout(timeout_s - cancel_s):
                ticket = await asyncio.shield(submitting)
                urls = await _until_known(partial(self._face.look, ticket, now_s))
                self._wire.checked_number(len(urls), job.images)
                pngs = await asyncio.gather(*(_until_known(partial(self._wire.picture, url)) for url in urls))
        except TimeoutError:
            waited = f"not done in {timeout_s:.1f} s"
            if not submitting.done():
                self._start(self._cancel_when_taken(submitting))
                raise ProviderAmbiguousError(self._wire.name, waited) from None
            if await self._cancelled_in_time(submitting.result(), cancel_s):
                raise ProviderRefusedError(self._wire.name, f"{waited}: it never began, and was cancelled") from None
            raise ProviderAmbiguousError(self._wire.name, waited) from None
        except asyncio.CancelledError:
            self._start(self._cancel_when_taken(submitting))
            raise
        seed = job.seed if job.seed_asked else None
        return Made(pngs=tuple(self._wire.checked(png, job.size) for png in pngs), seed=seed)

    async def aclose(self) -> None:
        """Cancels that are under way are waited for: each has its own bound."""
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._wire.aclose()

    def _start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def _cancel_when_taken(self, submitting: asyncio.Task[Ticket]) -> None:
        try:
            ticket = await submitting
        except ProviderError:
            return  # nothing was taken, or nobody will ever know what
        await self._cancelled_in_time(ticket, CANCEL_S * 3)

    async def _cancelled_in_time(self, ticket: Ticket, within_s: float) -> bool:
        try:
            async with asyncio.timeout(within_s):
                return await self._face.cancel(ticket)
        except (TimeoutError, ProviderError):
            return False


async def _until_known(look: Callable[[], Awaitable[T | None]]) -> T:
    """Look again and again; whoever calls it sets the deadline."""
    pause_s = LOOK_FIRST_S
    while True:
        found = await look()
        if found is not None:
            return found
        await asyncio.sleep(pause_s)
        pause_s = min(pause_s * 1.5, LOOK_MAX_S)
