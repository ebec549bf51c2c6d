"""The routers that live in this process, and what they know.

Serve pickles a router's class by value, yet imports this module by name: so it is the one place where the router's
copy and the gateway meet. Reading costs no message.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tidegate.ids import PoolName


@dataclass(frozen=True, slots=True)
class PoolSeen:
    """One pool as its router sees it now. The replicas' queues hold other gateways' requests too."""

    replicas: int
    """Running."""
    ongoing: int
    """Over all running replicas, by the newest news from each."""
    slots_each: int
    """Requests that one replica takes at a time."""


class PoolRouter(Protocol):
    def seen(self) -> PoolSeen: ...


ROUTERS: dict[PoolName, PoolRouter] = {}
"""Filled by the routers themselves, when Serve makes them."""


def pools_seen() -> dict[PoolName, PoolSeen]:
    return {name: router.seen() for name, router in list(ROUTERS.items())}
