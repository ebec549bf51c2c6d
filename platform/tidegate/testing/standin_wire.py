"""Answers that a sound server never gives: held back, cut off, reset, or dripping."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Iterator
from typing import Any

from fastapi import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from tidegate.testing.standin_studio import DRIP_S

MARK = {"x-tidegate-stand-in": "true"}
"""On every answer: its pictures are coloured boxes, not a model's work."""

_CONNECTION = "tidegate.connection"
_PIECES = 40


class KnowsItsConnection:
    """Middleware that keeps uvicorn's transport where `Reset` finds it: ASGI has no word for breaking a connection."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope[_CONNECTION] = receive.__self__.transport  # type: ignore[attr-defined]
        await self._app(scope, receive, send)


class Hang(Response):
    """Never answers; ends when the client leaves."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass


class Cut(Response):
    """Promises a body and returns without it, upon which uvicorn closes the connection."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"application/json"), (b"content-length", b"1000")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"{", "more_body": True})


class Reset(Response):
    """Not one byte: the client's next read fails with a reset by the peer."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        transport: Any = scope[_CONNECTION]
        # Lingering for zero seconds turns the close into a reset (socket(7), SO_LINGER).
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()


class Drip(Response):
    """The whole body, in small pieces with pauses: each read succeeds, so only an absolute deadline ends it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for piece in _pieces(bytes(self.body)):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(DRIP_S)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _pieces(body: bytes) -> Iterator[bytes]:
    step = max(1, len(body) // _PIECES)
    for start in range(0, len(body), step):
        yield body[start : start + step]
