"""A Redis, as the operator names it in `policy.yaml`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from tidegate.spec.base import Model


class RedisSpec(Model):
    """`cluster.redis`: where the head keeps what must outlive it; without it a lost head is a lost cluster.
    `gateway_redis`: where gateways keep what they share."""

    address: Annotated[str, Field(pattern=r"^[^\s:/]+:\d{1,5}$")]
    """`host:port` of a Redis that does not stand or fall with the machines that use it."""
    namespace: Annotated[str, Field(min_length=1)] = "tidegate"
    """Keeps clusters apart that share one Redis. A new cluster under an old name finds what the old one left."""
    password_env: str | None = None
    """Name of the environment variable that holds the password; it never stands in this file."""
