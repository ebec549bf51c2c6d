"""The replica's side: takes calls from gateways, as many at a time as it has slots."""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Protocol, cast

from tidegate.serve.hop.frames import (
    Frame,
    FrameError,
    Frames,
    Kind,
    from_made,
    from_partial,
    from_words,
    to_job,
)
from tidegate.serve.hop.sockets import watch_peer
from tidegate.serve.replica_registry import PORT, TOKEN
from tidegate.serve.work import ImageJob, Made, Partial, UnfitError

COUNT_S = 0.02
"""A changed queue is told to the other gateways after this: one word for many changes."""

_LOG = logging.getLogger("ray.serve")


class Worker(Protocol):
    async def make(self, job: ImageJob) -> Made:
        """
        Raises:
            UnfitError: see `work`.
        """

    def make_shown(self, job: ImageJob) -> AsyncGenerator[Partial | Made, None]:
        """As `make`, with unfinished pictures before the answer, which comes last."""


class HopServer:
    """Takes calls from `open` on until `drain`. Of one event loop."""

    def __init__(self, worker: Worker, slots: int) -> None:
        self.worker, self._slots = worker, slots
        self._token = secrets.token_hex(16)
        """Serve hands it to gateways with the address, so nobody else calls, and no line ends at a later process that
        got the same port."""
        self._lines: set[_Line] = set()
        self._running: set[asyncio.Task[Made]] = set()
        self._draining = False
        self._alone = asyncio.Event()
        self._telling: asyncio.TimerHandle | None = None

    async def open(self, host: str) -> dict[str, str | int]:
        """Listen on a free port of `host`; returns what the replica is to say of itself to Serve."""
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(lambda: _Line(self), host, 0)
        port: int = self._listener.sockets[0].getsockname()[1]
        return {PORT: port, TOKEN: self._token}

    async def drain(self) -> None:
        """Take nothing new, finish what there is, hang up when all of it is sent: the process may end then."""
        self._draining = True
        self._listener.close()
        for line in self._lines:
            line.tell(Kind.CLOSING)
        while self._running:
            await asyncio.wait(self._running)
        for line in self._lines:
            line.hang_up()
        if self._lines:
            await self._alone.wait()

    def knows(self, token: bytes) -> bool:
        return hmac.compare_digest(token, self._token.encode())

    @property
    def ongoing(self) -> int:
        return len(self._running)

    @property
    def takes(self) -> bool:
        return not self._draining and len(self._running) < self._slots

    def joined(self, line: _Line) -> None:
        self._lines.add(line)
        line.tell(Kind.CLOSING if self._draining else Kind.HELLO)

    def left(self, line: _Line) -> None:
        self._lines.discard(line)
        if self._draining and not self._lines:
            self._alone.set()

    def begin(self, task: asyncio.Task[Made]) -> None:
        self._running.add(task)
        self._count_soon()

    def end(self, task: asyncio.Task[Made]) -> None:
        self._running.discard(task)
        self._count_soon()

    def _count_soon(self) -> None:
        if self._telling is None and len(self._lines) > 1:
            self._telling = asyncio.get_running_loop().call_later(COUNT_S, self._tell_counts)

    def _tell_counts(self) -> None:
        self._telling = None
        for line in self._lines:
            line.tell_others()


class _Line(asyncio.Protocol):
    """To one gateway."""

    def __init__(self, server: HopServer) -> None:
        self._server = server
        self._frames = Frames()
        self._known = False
        self._calls: dict[int, asyncio.Task[Made]] = {}
        self._told_others = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none of asyncio's own classes
        watch_peer(self._transport)

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._frames.of(data):
                self._take(frame)
        except FrameError as error:
            _LOG.warning("a gateway's line is cut: %s", error)
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.left(self)
        for task in self._calls.values():  # nobody waits for them
            task.cancel()

    def tell(self, kind: Kind, call: int = 0, payload: bytes = b"") -> None:
        self._told_others = self._server.ongoing - len(self._calls)
        self._transport.write(Frame(kind, call, self._told_others, payload).encoded())

    def tell_others(self) -> None:
        if self._told_others != self._server.ongoing - len(self._calls):
            self.tell(Kind.OTHERS)

    def hang_up(self) -> None:
        self._transport.close()

    def _take(self, frame: Frame) -> None:
        if not self._known:
            if frame.kind is not Kind.HELLO or not self._server.knows(frame.payload):
                raise FrameError("it does not know this replica's token")
            self._known = True
            self._server.joined(self)
        elif frame.kind in (Kind.CALL, Kind.CALL_SHOWN):
            self._begin(frame)
        elif frame.kind is Kind.CANCEL:
            task = self._calls.get(frame.call)
            if task is not None:
                task.cancel()
        else:
            raise FrameError(f"a gateway said {frame.kind.name}")

    def _begin(self, frame: Frame) -> None:
        if not self._server.takes:
            self.tell(Kind.BUSY, frame.call)
            return
        job = to_job(frame.payload)
        made = self._make_shown(frame.call, job) if frame.kind is Kind.CALL_SHOWN else self._make(job)
        task = asyncio.get_running_loop().create_task(made)
        self._calls[frame.call] = task
        self._server.begin(task)
        # By a callback: a task that is cancelled before its first step never runs.
        task.add_done_callback(partial(self._end, frame.call))

    async def _make(self, job: ImageJob) -> Made:
        return await self._server.worker.make(job)

    async def _make_shown(self, call: int, job: ImageJob) -> Made:
        async with aclosing(self._server.worker.make_shown(job)) as items:
            async for item in items:
                if isinstance(item, Made):
                    return item
                self.tell(Kind.PART, call, from_partial(item))
        raise RuntimeError("the engine's stream ended without a picture")

    def _end(self, call: int, task: asyncio.Task[Made]) -> None:
        del self._calls[call]
        self._server.end(task)
        if not self._transport.is_closing():
            self.tell(*_said_of(call, task))


def _said_of(call: int, task: asyncio.Task[Made]) -> tuple[Kind, int, bytes]:
    if task.cancelled():
        return Kind.ENDED, call, b""
    error = task.exception()
    if error is None:
        return Kind.MADE, call, from_made(task.result())
    if isinstance(error, UnfitError):
        return Kind.UNFIT, call, from_words(error.param, error.why)
    _LOG.error("a picture could not be made", exc_info=error)
    return Kind.FAILED, call, from_words(str(error)[:300])
