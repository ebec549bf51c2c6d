"""A Redis, as the operator names it in `policy.yaml`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from tidegate.errors import PolicyError
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

    @property
    def host(self) -> str:
        return self.address.partition(":")[0]

    @property
    def port(self) -> int:
        return int(self.address.partition(":")[2])

    def password(self, where: str, environ: Mapping[str, str]) -> str | None:
        """`where` is this setting's path, for the message.

        Raises:
            PolicyError: the environment lacks it.
        """
        if self.password_env is None:
            return None
        password = environ.get(self.password_env)
        if not password:
            why = f"{where}.password_env: the environment has no {self.password_env}; export it before Ray starts"
            raise PolicyError((why,))
        return password
