"""The gateway's side: a line to each replica that Serve lists, and the choice of one that has a free slot."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import cast

from tidegate.ids import PoolName
from tidegate.serve.backends import PoolSeen
from tidegate.serve.hop.frames import (
    ENDS,
    Frame,
    FrameError,
    Frames,
    Kind,
    from_job,
    to_made,
    to_partial,
    to_words,
)
from tidegate.serve.hop.sockets import SILENT_S, watch_peer
from tidegate.serve.replica_registry import ReplicaAddress
from tidegate.serve.work import EngineFailedError, ImageJob, Made, Partial, PoolBusyError, PoolLostError, UnfitError

RETRY_S = 0.25
"""Between two tries to reach a replica that Serve lists."""

_LOG = logging.getLogger("ray.serve")


@dataclass(slots=True)
class _Call:
    end: asyncio.Future[Made]
    parts: asyncio.Queue[Partial | None] | None
    """Of one that is shown; None in it: the end is there."""


class Line(asyncio.Protocol):
    """To one replica, from the first handshake until either side hangs up."""

    def __init__(self, address: ReplicaAddress) -> None:
        self.address = address
        self.gone = asyncio.Event()
        self._frames = Frames()
        self._calls: dict[int, _Call] = {}
        """Cancelled ones too, until the replica says that their slot is free."""
        self._number = 0
        self._others = 0
        self._up = self._retired = False

    @property
    def takes_calls(self) -> bool:
        return self._up and not self._retired

    @property
    def ongoing(self) -> int:
        """Requests at the replica, other gateways' too."""
        return self._others + len(self._calls)

    @property
    def has_room(self) -> bool:
        return self.takes_calls and self.ongoing < self.address.slots

    async def make(self, job: ImageJob) -> Made:
        """Make the job's pictures there. A cancelled call stops between two denoise steps.

        Raises:
            PoolBusyError, PoolLostError, EngineFailedError, UnfitError: see `work`.
        """
        number, call = self._begin(Kind.CALL, job, None)
        try:
            return await call.end
        except asyncio.CancelledError:
            self._cancel(number)
            raise

    async def make_shown(self, job: ImageJob, show: Callable[[Partial], Awaitable[None]]) -> Made:
        """As `make`; `show` is awaited with each unfinished picture as it comes."""
        parts = asyncio.Queue[Partial | None]()
        number, call = self._begin(Kind.CALL_SHOWN, job, parts)
        try:
            while (part := await parts.get()) is not None:
                await show(part)
            return await call.end
        finally:
            self._cancel(number)

    def retire(self) -> None:
        """Send nothing new there; hang up when all is done."""
        self._retired = True
        self._hang_up_if_done()

    def _begin(self, kind: Kind, job: ImageJob, parts: asyncio.Queue[Partial | None] | None) -> tuple[int, _Call]:
        self._number = number = (self._number + 1) % 2**32
        self._calls[number] = call = _Call(asyncio.get_running_loop().create_future(), parts)
        self._transport.write(Frame(kind, number, payload=from_job(job)).encoded())
        return number, call

    def _cancel(self, number: int) -> None:
        call = self._calls.get(number)
        if call is not None:
            call.end.cancel()
            self._transport.write(Frame(Kind.CANCEL, number).encoded())

    def _hang_up_if_done(self) -> None:
        if self._retired and not self._calls:
            self._transport.close()

    # What the socket says

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none of asyncio's own classes
        watch_peer(self._transport)
        self._transport.write(Frame(Kind.HELLO, payload=self.address.token.encode()).encoded())

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._frames.of(data):
                self._take(frame)
        except FrameError as error:
            _LOG.warning("the line to replica %s is cut: %s", self.address.name, error)
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._up = False
        for number in list(self._calls):
            self._end(number, PoolLostError(f"the line to replica {self.address.name} was lost: {exc or 'it hung up'}"))
        self.gone.set()

    def _take(self, frame: Frame) -> None:
        self._others = frame.others
        if frame.kind is Kind.HELLO:
            self._up = True
        elif frame.kind is Kind.CLOSING:
            self._retired = True  # it hangs up itself, when it has done what it has
        elif frame.kind is Kind.PART:
            call = self._calls.get(frame.call)
            if call is not None and call.parts is not None:
                call.parts.put_nowait(to_partial(frame.payload))
        elif frame.kind in ENDS:
            self._end(frame.call, _result_of(frame, self.address))
            self._hang_up_if_done()
        elif frame.kind is not Kind.OTHERS:
            raise FrameError(f"a replica said {frame.kind.name}")

    def _end(self, number: int, result: Made | Exception) -> None:
        call = self._calls.pop(number, None)
        if call is None:
            raise FrameError(f"the end of a call that was never made: {number}")
        if not call.end.done():
            if isinstance(result, Made):
                call.end.set_result(result)
            else:
                call.end.set_exception(result)
        if call.parts is not None:
            call.parts.put_nowait(None)


def _result_of(frame: Frame, address: ReplicaAddress) -> Made | Exception:
    match frame.kind:
        case Kind.MADE:
            return to_made(frame.payload)
        case Kind.UNFIT:
            param, why = to_words(frame.payload)
            return UnfitError(param, why)
        case Kind.FAILED:
            return EngineFailedError(*to_words(frame.payload))
        case Kind.BUSY:
            return PoolBusyError(address.name)
        case _:
            return PoolLostError(f"replica {address.name} gave up a call that nobody had cancelled")


class Lines:
    """To the replicas of all pools, as Serve lists them. Of one event loop."""

    def __init__(self) -> None:
        self._pools: dict[PoolName, dict[str, _Reach]] = {}

    def follow(self, pool: PoolName, listed: Iterable[ReplicaAddress]) -> None:
        """Keep a line to each that is listed; let those that no longer are finish what they have."""
        kept = self._pools.setdefault(pool, {})
        now = {address.name: address for address in listed}
        for name in kept.keys() - now.keys():
            kept.pop(name).leave()
        for name in now.keys() - kept.keys():
            kept[name] = _Reach(now[name])

    def forget(self, pool: PoolName) -> None:
        self.follow(pool, ())
        del self._pools[pool]

    def seen(self) -> dict[PoolName, PoolSeen]:
        """Each pool now. Cheap."""
        return {pool: _seen(kept.values()) for pool, kept in self._pools.items()}

    def pick(self, pool: PoolName) -> Line:
        """
        Raises:
            PoolBusyError: no replica of it has a free slot, or there is none.
        """
        lines = [reach.line for reach in self._pools.get(pool, {}).values() if reach.line and reach.line.has_room]
        if not lines:
            raise PoolBusyError(pool)
        # Of two by chance the less busy one: gateways that all took the least busy would meet there.
        return min(random.sample(lines, min(2, len(lines))), key=lambda line: line.ongoing)

    def close(self) -> None:
        for pool in list(self._pools):
            self.forget(pool)


def _seen(reaches: Iterable[_Reach]) -> PoolSeen:
    lines = [reach.line for reach in reaches if reach.line and reach.line.takes_calls]
    return PoolSeen(len(lines), sum(line.ongoing for line in lines), lines[0].address.slots if lines else 0)


class _Reach:
    """Keeps a line up to one replica for as long as Serve lists it."""

    def __init__(self, address: ReplicaAddress) -> None:
        self.line: Line | None = None
        self._address = address
        self._keeping = asyncio.get_running_loop().create_task(self._keep())

    def leave(self) -> None:
        self._keeping.cancel()
        if self.line is not None:
            self.line.retire()

    async def _keep(self) -> None:
        address, said = self._address, False
        while True:
            try:
                async with asyncio.timeout(SILENT_S):
                    _, self.line = await asyncio.get_running_loop().create_connection(
                        lambda: Line(address), address.host, address.port
                    )
                await self.line.gone.wait()
            except OSError as error:  # a timeout too. Once: it may be listed for a while after its death
                if not said:
                    _LOG.warning("replica %s at %s:%d: %s", address.name, address.host, address.port, error)
                said = True
            await asyncio.sleep(RETRY_S)
