"""Names for things, as types: a node id can't be passed where a GPU's is meant."""

from enum import StrEnum
from functools import cache
from typing import NewType

NodeId = NewType("NodeId", str)
"""Ray's node id, 56 hex digits (`ray.io/node-id`)."""

GpuId = NewType("GpuId", str)
"""A GPU's UUID as NVML gives it, `GPU-…`; indexes are never used as identity (NVML and CUDA order them differently)."""

ClaimId = NewType("ClaimId", str)
PoolName = NewType("PoolName", str)
"""One Serve deployment: the replicas of one node."""

POOL_PREFIX = "pool-"

ProviderName = NewType("ProviderName", str)
GatewayId = NewType("GatewayId", str)
RequestId = NewType("RequestId", str)

Generation = NewType("Generation", int)
"""Fencing number: an order that carries an older one is ignored."""


class Tier(StrEnum):
    """What a GPU is good enough for."""

    GANG = "gang"
    SERVE = "serve"
    NONE = "none"


def pools_app(app: str) -> str:
    """The Serve application that holds the pools of `app`; it has none but them, so they can follow the nodes."""
    return f"{app}-pools"


@cache
def pool_name(node: NodeId) -> PoolName:
    """The Serve deployment that holds the replicas of `node`."""
    return PoolName(f"{POOL_PREFIX}{node[:12]}")


def coordinator_name(run: str) -> str:
    """The actor that leads the gang of a run."""
    return f"gang-{run}"


def health_agent_name(node: NodeId) -> str:
    """The actor that watches a node."""
    return f"health-{node[:12]}"
