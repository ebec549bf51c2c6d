"""Between the work on a request and its client: unfinished pictures go out while the work goes on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any

from starlette.responses import Response, StreamingResponse

from tidegate.serve.pictures import error_event


class Relay:
    """One request's. Where nothing is `put`, the client gets the work's own response with its own status."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._headers: Mapping[str, str] = {}

    def put(self, event: bytes, headers: Mapping[str, str]) -> None:
        """Send an event; `headers` are the response's, with the first one."""
        self._headers = self._headers or headers
        self._events.put_nowait(event)

    async def response(self, work: Coroutine[Any, Any, Response]) -> Response:
        """What `work` returns, or a stream of what was put and then of that. Its client gone, the work is cancelled."""
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(lambda _: self._events.put_nowait(None))
        try:
            first = await self._events.get()
        except asyncio.CancelledError:
            await _ended(task)
            raise
        if first is None:
            return task.result()
        return StreamingResponse(self._streamed(first, task), media_type="text/event-stream", headers=self._headers)

    async def _streamed(self, first: bytes, task: asyncio.Task[Response]) -> AsyncIterator[bytes]:
        try:
            event: bytes | None = first
            while event is not None:
                yield event
                event = await self._events.get()
            yield _last_of(task)
        finally:
            await _ended(task)


def _last_of(task: asyncio.Task[Response]) -> bytes:
    """The answer's events. A failure is an event too: its status is out, and nothing is sent twice (C166)."""
    error = task.exception()
    if error is None:
        answer = task.result()
        body = bytes(answer.body)
        return body if answer.status_code < 400 else error_event(json.loads(body))
    why = "the gateway failed at this request; its log says why"
    return error_event({"error": {"message": why, "type": "server_error", "param": None, "code": "internal_error"}})


async def _ended(task: asyncio.Task[Response]) -> None:
    task.cancel()
    await asyncio.wait([task])
