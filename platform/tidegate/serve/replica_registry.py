"""Which replicas Serve lists, told within this process by the routers that Serve makes here.

Serve pickles a router's class by value, yet imports this module by name: so it is the one place where the router's
copy and the gateway meet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from tidegate.ids import PoolName

PORT, TOKEN = "tidegate_port", "tidegate_token"
"""Keys of what a replica says of itself to Serve (`record_replica_metadata`), which tells it to every router."""


@dataclass(frozen=True, slots=True)
class ReplicaAddress:
    name: str
    """Serve's own id of it: never used twice."""
    host: str
    port: int
    token: str
    slots: int
    """Requests that it takes at a time."""

    @classmethod
    def of(cls, name: str, host: str | None, slots: int, metadata: Mapping[str, Any]) -> ReplicaAddress | None:
        """None: it takes no calls of ours."""
        if host is None or PORT not in metadata or TOKEN not in metadata:
            return None
        return cls(name, host, int(metadata[PORT]), str(metadata[TOKEN]), slots)


Listener: TypeAlias = Callable[[PoolName, tuple[ReplicaAddress, ...]], None]

LISTENERS: list[Listener] = []
"""Called in the routers' own thread."""


def tell(pool: PoolName, replicas: tuple[ReplicaAddress, ...]) -> None:
    """All that Serve lists for `pool` now."""
    for listener in list(LISTENERS):
        listener(pool, replicas)
