"""TCP ports of this machine: a free one, and whether a certain one is."""

from __future__ import annotations

import socket

from tidegate.errors import PortInUseError


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def check_port_free(port: int, purpose: str, hint: str) -> None:
    """Raises PortInUseError, with the hint how to choose another, when something listens on `port`."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            raise PortInUseError(port, purpose, hint) from None
