"""The line of requests that have no place yet: by class, then first come, first served. Looked at on every change."""

from __future__ import annotations

import asyncio
import bisect
from dataclasses import dataclass

from tidegate.clock import Clock
from tidegate.serve.backends import Backends
from tidegate.serve.hedging import second_place
from tidegate.serve.routing import Reject, RouteRequest, ToLocal, ToProvider, View, Wait, pick, wait_is_for_all

LOOK_AGAIN_S = 0.05
"""While somebody waits: replicas come and go without a word to us."""


@dataclass(slots=True)
class _Ticket:
    request: RouteRequest
    placed: asyncio.Future[ToLocal | ToProvider | Reject]


def _turn(ticket: _Ticket) -> tuple[int, float]:
    return ticket.request.priority, ticket.request.accepted_at_s


class Dispatcher:
    """Places requests by `routing.pick`. A placed request holds a slot until `done`."""

    def __init__(self, backends: Backends, clock: Clock) -> None:
        self._backends, self._clock = backends, clock
        self._line: list[_Ticket] = []
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        return len(self._line)

    async def place(self, request: RouteRequest) -> ToLocal | ToProvider | Reject:
        """Wait for a place, at most until the request's deadline. One that comes back keeps its place in the line."""
        ticket = _Ticket(request, asyncio.get_running_loop().create_future())
        bisect.insort(self._line, ticket, key=_turn)
        self.look()
        try:
            return await ticket.placed
        except asyncio.CancelledError:
            if ticket in self._line:
                self._line.remove(ticket)
            elif ticket.placed.done() and not ticket.placed.cancelled():
                place = ticket.placed.result()
                if not isinstance(place, Reject):  # placed in the very moment in which the client left
                    self.done(place)
            raise

    def place_second(self, request: RouteRequest, first: ToLocal | ToProvider) -> ToLocal | ToProvider | None:
        """A second place for a placed request, where one is free and nobody waits for it."""
        if self._line:
            return None
        now_s = self._clock.now_s()
        place = second_place(request, first, self._backends.view(now_s), now_s)
        if place is not None:
            self._backends.reserve(place)
        return place

    def done(self, place: ToLocal | ToProvider) -> None:
        self._backends.release(place)
        self.look()

    def look(self) -> None:
        """Place whoever can be placed now. To be called when something may have changed."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._line:
            return
        now_s = self._clock.now_s()
        view: View | None = None
        next_s = now_s + LOOK_AGAIN_S
        still: list[_Ticket] = []
        for index, ticket in enumerate(self._line):
            if view is None:
                view = self._backends.view(now_s)
            step = pick(ticket.request, view, now_s, ahead=len(still))
            if isinstance(step, Wait):
                still.append(ticket)
                next_s = min(next_s, step.until_s)
                if wait_is_for_all(view, now_s):
                    still += self._line[index + 1 :]
                    break
                continue
            if ticket.placed.done():  # its client left; it removes itself
                continue
            if not isinstance(step, Reject):
                self._backends.reserve(step)
                view = None  # a new one only if somebody comes after it
            ticket.placed.set_result(step)
        self._line = still
        if still:
            self._timer = asyncio.get_running_loop().call_later(max(0.001, next_s - now_s), self.look)
