"""Tenants' limits counted in Redis, for all gateways together.

One script asks and takes, so no two gateways can both have the last place. The rate is `rate.take`'s rule, word for
word; a test plays both. An open request holds its place until it leaves, or until its deadline where its gateway was
killed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from tidegate.serve.rate import Rate
from tidegate.spec.redis import RedisSpec

ANSWER_S = 0.25
"""A Redis that takes longer is away: then each gateway counts for itself, and no request waits for it."""

_TAKE = """
local now, spacing, most = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local who, ends = ARGV[4], tonumber(ARGV[5])
if most > 0 then
    redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
    if redis.call('ZCARD', KEYS[2]) >= most then return {'open', '0'} end
end
if spacing > 0 then
    local due = tonumber(redis.call('GET', KEYS[1]) or '0')
    if due - now > 60 + spacing then due = now end
    local later = math.max(due, now) + spacing
    local wait = later - now - 60
    if wait > 1e-6 then return {'rate', string.format('%.6f', wait)} end
    redis.call('SET', KEYS[1], string.format('%.6f', later), 'EX', 180)
end
if most > 0 then
    redis.call('ZADD', KEYS[2], ends, who)
    redis.call('EXPIRE', KEYS[2], math.ceil(ends - now) + 60)
end
return {'in', '0'}
"""

_LOG = logging.getLogger("ray.serve")


class CountsAwayError(ConnectionError):
    """Redis did not answer."""


class SharedCounts:
    """`hold_s`: how long a request may be open."""

    def __init__(self, spec: RedisSpec, environ: Mapping[str, str], hold_s: float) -> None:
        self._redis: Any = Redis(
            host=spec.host,
            port=spec.port,
            password=spec.password("gateway_redis", environ),
            decode_responses=True,
            socket_timeout=ANSWER_S,
            socket_connect_timeout=ANSWER_S,
            retry=Retry(NoBackoff(), 0),  # the library's own would wait for seconds
        )
        self._prefix, self._hold_s = f"{{{spec.namespace}}}:tenant:", hold_s
        self._take = self._redis.register_script(_TAKE)
        self._there = True

    async def take(
        self, caller: str, rate: Rate | None, open_max: int | None, request: str, now_s: float
    ) -> tuple[str, float]:
        """Ask for one: `in`, or what is full, `open` or `rate`, and for how many seconds.

        Raises:
            CountsAwayError: see there.
        """
        spacing_s = 0.0 if rate is None else rate.spacing_s
        keys = [f"{self._prefix}{caller}:due", f"{self._prefix}{caller}:open"]
        arguments: list[str | int] = [repr(now_s), repr(spacing_s), open_max or 0, request, repr(now_s + self._hold_s)]
        try:
            said, wait_s = await self._take(keys=keys, args=arguments)
        except (RedisError, OSError) as error:
            self._hear(error)
            raise CountsAwayError from None
        self._hear(None)
        return said, float(wait_s)

    async def leave(self, caller: str, request: str) -> None:
        try:
            await self._redis.zrem(f"{self._prefix}{caller}:open", request)
        except (RedisError, OSError) as error:
            self._hear(error)  # its place is free again at its deadline

    async def aclose(self) -> None:
        await self._redis.aclose()

    def _hear(self, error: Exception | None) -> None:
        """Log a change only."""
        if error is not None and self._there:
            _LOG.warning("gateway_redis does not answer, tenants are counted by each gateway: %s", error)
        elif error is None and not self._there:
            _LOG.info("gateway_redis is back")
        self._there = error is None
