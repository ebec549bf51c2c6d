"""Who asks: found by their key, counted against their limits: one gateway's own counts, or those of all over Redis."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from tidegate.errors import PolicyError
from tidegate.serve.api import ApiError
from tidegate.serve.rate import Rate, take
from tidegate.serve.webhooks import secret_bytes
from tidegate.spec.policy import Policy
from tidegate.spec.secrets import read_secrets
from tidegate.spec.tenants import HedgeWord, TenantSpec

_PRIORITIES = {"interactive": 0, "batch": 1}


@dataclass(slots=True)
class Caller:
    name: str
    local_only: bool = False
    hedge: HedgeWord = "never"
    priority: int = 0
    suspended: bool = False
    rate: Rate | None = None
    concurrent_max: int | None = None
    jobs_running_max: int | None = None
    webhook_origins: tuple[str, ...] = ()
    webhook_secret: bytes | None = field(default=None, repr=False)
    _due_s: float = field(default=0.0, init=False)
    _open: int = field(default=0, init=False)

    @contextmanager
    def enter(self, now_s: float) -> Iterator[None]:
        """For as long as one request is open.

        Raises:
            ApiError: 429 with the time to wait, before any work.
        """
        if self.concurrent_max is not None and self._open >= self.concurrent_max:
            raise self.too_many_open()
        self.count(now_s)
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1

    def count(self, now_s: float) -> None:
        """One more request, or job.

        Raises:
            ApiError: 429.
        """
        if self.rate is None:
            return
        self._due_s, wait_s = take(self._due_s, self.rate, now_s)
        if wait_s:
            raise self.too_often(wait_s)

    def too_many_open(self) -> ApiError:
        why = f"this key may have {self.concurrent_max} requests open at a time"
        return ApiError(429, why, code="concurrency_limit_exceeded", retry_after_s=1.0)

    def too_often(self, wait_s: float) -> ApiError:
        why = f"this key may ask {self.rate.per_min if self.rate else 0} times a minute"
        return ApiError(429, why, code="rate_limit_exceeded", retry_after_s=wait_s)


class Counts(Protocol):
    """See `shared_counts.SharedCounts`."""

    async def take(
        self, caller: str, rate: Rate | None, open_max: int | None, request: str, now_s: float
    ) -> tuple[str, float]: ...

    async def leave(self, caller: str, request: str) -> None: ...

    async def aclose(self) -> None: ...


class Callers:
    """Keys are kept and looked up as SHA-256, so neither a dump of this process's settings nor the time that a look-up
    takes says anything of them.

    Raises:
        PolicyError: a secret is missing, too short or given to two tenants.
    """

    def __init__(
        self, tenants: tuple[TenantSpec, ...], environ: Mapping[str, str], shared: Counts | None = None
    ) -> None:
        self._shared = shared
        self._by_key: dict[bytes, Caller] = {}
        self._anybody = None if tenants else Caller("anybody", hedge="asked")
        self._by_name: dict[str, Caller] = {} if self._anybody is None else {self._anybody.name: self._anybody}
        for tenant in tenants:
            caller = self._by_name[tenant.name] = _caller(tenant, environ)
            where = f"tenants.{tenant.name}.key"
            for key in read_secrets(where, tenant.key_env, tenant.key_file, environ):
                if self._by_key.setdefault(_digest(key), caller) is not caller:
                    other = self._by_key[_digest(key)].name
                    raise PolicyError((f"{where}: the same key as of tenant {other!r}; give each its own",))

    def identify(self, authorization: str | None) -> Caller:
        """Whose key it is, from the header `Authorization: Bearer KEY`.

        Raises:
            ApiError: 401 or 403.
        """
        if self._anybody is not None:
            return self._anybody
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise ApiError(401, "no key: send 'Authorization: Bearer KEY'", code="missing_api_key")
        caller = self._by_key.get(_digest(key.strip()))
        if caller is None:
            raise ApiError(401, "this key is not known here", code="invalid_api_key")
        if caller.suspended:
            raise ApiError(403, "this key is suspended", code="key_suspended")
        return caller

    @asynccontextmanager
    async def enter(self, caller: Caller, request: str, now_s: float) -> AsyncIterator[None]:
        """As `Caller.enter`, counted with all gateways where they share their counts."""
        if not await self._taken(caller, caller.concurrent_max, request, now_s):
            with caller.enter(now_s):
                yield
            return
        try:
            yield
        finally:
            if caller.concurrent_max is not None and self._shared is not None:
                # A client that leaves cancels this task, and its place must be given back all the same.
                await asyncio.shield(self._shared.leave(caller.name, request))

    async def count(self, caller: Caller, now_s: float) -> None:
        """As `Caller.count`, counted with all gateways where they share their counts."""
        if not await self._taken(caller, None, "", now_s):
            caller.count(now_s)

    async def _taken(self, caller: Caller, open_max: int | None, request: str, now_s: float) -> bool:
        """Whether it was counted with all gateways; False = they don't share, or can't now.

        Raises:
            ApiError: 429.
        """
        if self._shared is None or (caller.rate is None and open_max is None):
            return False
        try:
            said, wait_s = await self._shared.take(caller.name, caller.rate, open_max, request, now_s)
        except ConnectionError:
            return False
        if said == "open":
            raise caller.too_many_open()
        if said == "rate":
            raise caller.too_often(wait_s)
        return True

    async def aclose(self) -> None:
        if self._shared is not None:
            await self._shared.aclose()

    def named(self, name: str) -> Caller:
        """Whose job it is.

        Raises:
            ApiError: 403, since policy.yaml does not know it any more, or has suspended it.
        """
        caller = self._by_name.get(name)
        if caller is None or caller.suspended:
            raise ApiError(403, "this job's key is suspended", code="key_suspended")
        return caller

    def jobs_running_max(self) -> dict[str, int | None]:
        return {name: caller.jobs_running_max for name, caller in self._by_name.items()}

    def webhook_secret(self, name: str) -> bytes | None:
        caller = self._by_name.get(name)
        return None if caller is None else caller.webhook_secret


def open_callers(policy: Policy, environ: Mapping[str, str]) -> Callers:
    """As the policy says: over Redis where it names one.

    Raises:
        PolicyError: a secret is missing.
    """
    if policy.gateway_redis is None:
        return Callers(policy.tenants, environ)
    from tidegate.serve.shared_counts import SharedCounts  # an extra: only where it is configured

    shared = SharedCounts(policy.gateway_redis, environ, hold_s=policy.serving.request_deadline_s + 5.0)
    return Callers(policy.tenants, environ, shared)


def _caller(tenant: TenantSpec, environ: Mapping[str, str]) -> Caller:
    where = f"tenants.{tenant.name}.webhook_secret"
    secrets = read_secrets(where, tenant.webhook_secret_env, tenant.webhook_secret_file, environ)
    return Caller(
        tenant.name,
        local_only=tenant.local_only,
        hedge=tenant.hedge,
        priority=_PRIORITIES[tenant.priority],
        suspended=tenant.suspended,
        rate=None if tenant.requests_per_min is None else Rate(tenant.requests_per_min),
        concurrent_max=tenant.concurrent_max,
        jobs_running_max=tenant.jobs_running_max,
        webhook_origins=tenant.webhook_origins,
        webhook_secret=secret_bytes(where, secrets[0]) if secrets else None,
    )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
