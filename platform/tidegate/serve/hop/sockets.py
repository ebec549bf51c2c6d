"""A dead machine says no goodbye: the kernel asks for it, so a process that is only busy is never taken for dead."""

from __future__ import annotations

import asyncio
import socket

SILENT_S = 5
"""A machine that acknowledges nothing for so long is gone, and what was with it is lost."""


def watch_peer(transport: asyncio.Transport) -> None:
    """Cut the line when the other machine no longer answers, whether or not something is on its way."""
    own: socket.socket = transport.get_extra_info("socket")
    own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    own.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    own.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    own.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, SILENT_S - 1)
    own.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_S * 1000)
