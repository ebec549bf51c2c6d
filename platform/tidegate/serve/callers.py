"""Who asks: found by their key, counted against their limits. One gateway's own counts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from tidegate.errors import PolicyError
from tidegate.serve.api import ApiError
from tidegate.serve.rate import Rate, take
from tidegate.serve.webhooks import secret_bytes
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
            raise ApiError(
                429,
                f"this key may have {self.concurrent_max} requests open at a time",
                code="concurrency_limit_exceeded",
                retry_after_s=1.0,
            )
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
            why = f"this key may ask {self.rate.per_min} times a minute"
            raise ApiError(429, why, code="rate_limit_exceeded", retry_after_s=wait_s)


class Callers:
    """Keys are kept and looked up as SHA-256, so neither a dump of this process's settings nor the time that a look-up
    takes says anything of them.

    Raises:
        PolicyError: a secret is missing, too short or given to two tenants.
    """

    def __init__(self, tenants: tuple[TenantSpec, ...], environ: Mapping[str, str]) -> None:
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
