"""Jobs in Redis, which gateways of many machines share: the same exam as `JobStore`. Blocks; not for the event loop.

Each change is one optimistic transaction over all jobs: it watches a counter that every change moves, reads, and writes
all at once or begins again. Times are the gateways' own, so their clocks must agree to within a lease.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeAlias, TypeVar

import redis
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

from tidegate.serve.job_store import KeyReusedError
from tidegate.serve.jobs import Job, JobStatus, startable
from tidegate.spec.redis import RedisSpec

T = TypeVar("T")

Redis: TypeAlias = Any
Pipeline: TypeAlias = Any
"""redis-py names every form that an answer can take; with `decode_responses` it has one, and no type that says so."""

_NUMBERS = {"priority": int, "seed": int, "run": int, "deliveries": int}
_TIMES = frozenset({"created_at_s", "started_at_s", "ended_at_s", "computed_s", "delivered_at_s"})
_COLUMNS = tuple(field.name for field in fields(Job))
_LIGHT = tuple(name for name in _COLUMNS if name != "answer")
_RANK = 2**40
"""Of one step of priority over all numbers of jobs: both fit into the 53 bits of a sorted set's score."""


class RedisJobStore:
    """`owner` is this gateway. `prefix` names this cluster's keys, which a Redis cluster keeps in one place."""

    def __init__(self, client: Redis, prefix: str, owner: str, lease_s: float) -> None:
        self._redis, self._owner, self._lease_s = client, owner, lease_s
        self._prefix = f"{{{prefix}}}:jobs:"

    def close(self) -> None:
        self._redis.close()

    def submit(self, job: Job, waiting_max: int, key: str | None, digest: bytes) -> Job | None:
        """As `JobStore.submit`."""

        def change(pipe: Pipeline) -> Job | None:
            if key is not None:
                known = pipe.hgetall(self._key("key", job.caller, key))
                if known:
                    if known["digest"] != digest.hex():
                        raise KeyReusedError(key)
                    return self._read(pipe, known["id"])
            if pipe.zcard(self._key("queued", job.caller)) >= waiting_max:
                return None
            number = int(pipe.get(self._key("number")) or 0) + 1
            pipe.multi()
            pipe.set(self._key("number"), number)
            pipe.hset(self._job(job.id), mapping={**_stored(job), "number": number, "key": key or ""})
            pipe.zadd(self._key("of", job.caller), {job.id: number})
            self._queue(pipe, job.id, job.caller, job.priority, number)
            if key is not None:
                pipe.hset(self._key("key", job.caller, key), mapping={"id": job.id, "digest": digest.hex()})
            return job

        return self._change(change)

    def find(self, job: str, caller: str) -> Job | None:
        found = self._read(self._redis, job)
        return found if found is not None and found.caller == caller else None

    def listed(self, caller: str, *, after: str | None, limit: int, statuses: tuple[str, ...]) -> list[Job] | None:
        """As `JobStore.listed`."""
        mine, below = self._key("of", caller), "+inf"
        if after is not None:
            last = self._redis.zscore(mine, after)
            if last is None:
                return None
            below = f"({last:.0f}"
        found: list[Job] = []
        for start in range(0, self._redis.zcard(mine), 100):
            ids = self._redis.zrange(mine, below, "-inf", desc=True, byscore=True, offset=start, num=100)
            if not ids:
                break
            for job in self._lights(ids):
                if job.status in statuses and len(found) < limit:
                    found.append(job)
            if len(found) == limit:
                break
        return found

    def running(self) -> dict[str, int]:
        return self._counts(self._redis)

    def start(self, now_s: float, running_max: Mapping[str, int | None], free: int) -> list[Job]:
        """As `JobStore.start`."""
        if free <= 0 or not self._redis.exists(self._key("waiting")):
            return []

        def change(pipe: Pipeline) -> list[str]:
            queued: list[tuple[float, str, str]] = []
            for caller in pipe.smembers(self._key("waiting")):
                turn = pipe.zrange(self._key("queued", caller), 0, free - 1, withscores=True)
                queued += [(score, one, caller) for one, score in turn]
            order = [(job, caller) for _, job, caller in sorted(queued)]
            chosen = startable(order, self._counts(pipe), running_max, free)
            callers = dict(order)
            left = {caller: pipe.zcard(self._key("queued", caller)) for caller in set(callers.values())}
            pipe.multi()
            for job in chosen:
                caller = callers[job]
                self._unqueue(pipe, job, caller, left)
                pipe.hincrby(self._job(job), "run", 1)
                values = {"status": "running", "started_at_s": now_s, "owner": self._owner, "buying": 0}
                pipe.hset(self._job(job), mapping=values)
                pipe.zadd(self._key("leases"), {job: now_s + self._lease_s})
                pipe.hset(self._key("held"), job, caller)
            return chosen

        started = [self._read(self._redis, job) for job in self._change(change)]
        return [job for job in started if job is not None]

    def renew(self, now_s: float) -> set[str]:
        """As `JobStore.renew`."""
        if not self._redis.zcard(self._key("leases")):
            return set()

        def change(pipe: Pipeline) -> set[str]:
            mine = [job for job in self._held(pipe) if pipe.hget(self._job(job), "owner") == self._owner]
            asked = {job for job in mine if pipe.hget(self._job(job), "cancel_asked") == "1"}
            pipe.multi()
            if mine:
                pipe.zadd(self._key("leases"), dict.fromkeys(mine, now_s + self._lease_s))
            return asked

        return self._change(change)

    def recover(self, now_s: float, lost: str, *, mine: bool = False) -> int:
        """As `JobStore.recover`."""
        if not self._redis.zcard(self._key("leases")):
            return 0

        def change(pipe: Pipeline) -> int:
            if mine:
                ids = [job for job in self._held(pipe) if pipe.hget(self._job(job), "owner") == self._owner]
            else:
                ids = list(pipe.zrange(self._key("leases"), "-inf", f"({now_s}", byscore=True))
            rows = {job: pipe.hmget(self._job(job), "buying", "caller", "priority", "number") for job in ids}
            jobs = {job: self._read(pipe, job) for job in ids}
            pipe.multi()
            for job, (buying, caller, priority, number) in rows.items():
                held = jobs[job]
                assert held is not None
                if buying == "1":
                    self._end(pipe, held, now_s, JobStatus.FAILED, {"error": lost})
                    continue
                self._let_go(pipe, job)
                pipe.hset(self._job(job), mapping={"status": "queued", "owner": ""})
                self._queue(pipe, job, caller, int(priority), int(number))
            return len(rows)

        return self._change(change)

    def buying(self, job: str, yes: bool) -> bool:
        """As `JobStore.buying`."""
        return self._if_mine(job, lambda pipe, held: pipe.hset(self._job(job), "buying", int(yes)))

    def end(self, job: str, now_s: float, status: JobStatus, **values: object) -> bool:
        """As `JobStore.end`."""
        return self._if_mine(job, lambda pipe, held: self._end(pipe, held, now_s, status, values))

    def cancel(self, job: str, caller: str, now_s: float) -> Job | None:
        """As `JobStore.cancel`."""

        def change(pipe: Pipeline) -> None:
            found = self._read(pipe, job)
            left = {caller: pipe.zcard(self._key("queued", caller))}
            pipe.multi()
            if found is None or found.caller != caller:
                return
            if found.status is JobStatus.QUEUED:
                self._unqueue(pipe, job, caller, left)
                self._end(pipe, found, now_s, JobStatus.CANCELLED, {})
            elif found.status is JobStatus.RUNNING:
                pipe.hset(self._job(job), "cancel_asked", 1)

        self._change(change)
        return self.find(job, caller)

    def due_deliveries(self, now_s: float, hold_s: float, most: int) -> list[Job]:
        """As `JobStore.due_deliveries`."""
        due_key = self._key("due")
        if not self._redis.zcount(due_key, "-inf", now_s):
            return []

        def change(pipe: Pipeline) -> list[str]:
            due = list(pipe.zrange(due_key, "-inf", now_s, byscore=True, offset=0, num=most))
            pipe.multi()
            if due:
                pipe.zadd(due_key, dict.fromkeys(due, now_s + hold_s))
            return due

        return self._lights(self._change(change))

    def delivered(self, job: str, *, delivered_at_s: float | None, next_at_s: float | None) -> None:
        """As `JobStore.delivered`."""

        def change(pipe: Pipeline) -> None:
            pipe.multi()
            pipe.hincrby(self._job(job), "deliveries", 1)
            if delivered_at_s is not None:
                pipe.hset(self._job(job), "delivered_at_s", delivered_at_s)
            if next_at_s is None:
                pipe.zrem(self._key("due"), job)
            else:
                pipe.zadd(self._key("due"), {job: next_at_s})

        self._change(change)

    def forget(self, before_s: float) -> None:
        """As `JobStore.forget`."""

        def change(pipe: Pipeline) -> None:
            old = list(pipe.zrange(self._key("ended"), "-inf", f"({before_s}", byscore=True))
            old = [job for job in old if pipe.zscore(self._key("due"), job) is None]
            rows = {job: pipe.hmget(self._job(job), "caller", "key") for job in old}
            pipe.multi()
            for job, (caller, key) in rows.items():
                pipe.delete(self._job(job))
                pipe.zrem(self._key("ended"), job)
                pipe.zrem(self._key("of", caller), job)
                if key:
                    pipe.delete(self._key("key", caller, key))

        self._change(change)

    def _if_mine(self, job: str, act: Callable[[Pipeline, Job], Any]) -> bool:
        def change(pipe: Pipeline) -> bool:
            held = self._read(pipe, job)
            mine = pipe.hget(self._job(job), "owner") == self._owner
            pipe.multi()
            if held is None or held.status is not JobStatus.RUNNING or not mine:
                return False
            act(pipe, held)
            return True

        return self._change(change)

    def _change(self, change: Callable[[Pipeline], T]) -> T:
        """`change` reads, calls `multi`, writes; it runs again where another change came between."""
        version = self._key("version")

        def counted(pipe: Pipeline) -> T:
            value = change(pipe)
            if pipe.explicit_transaction:
                pipe.incr(version)
            return value

        return self._redis.transaction(counted, version, value_from_callable=True)  # type: ignore[no-any-return]

    def _end(self, pipe: Pipeline, job: Job, now_s: float, status: JobStatus, values: Mapping[str, object]) -> None:
        self._let_go(pipe, job.id)
        row = {**values, "status": status.value, "ended_at_s": now_s}
        pipe.hset(self._job(job.id), mapping={name: value for name, value in row.items() if value is not None})
        pipe.zadd(self._key("ended"), {job.id: now_s})
        if job.webhook_url is not None:
            pipe.zadd(self._key("due"), {job.id: now_s})

    def _queue(self, pipe: Pipeline, job: str, caller: str, priority: int, number: int) -> None:
        pipe.zadd(self._key("queued", caller), {job: priority * _RANK + number})
        pipe.sadd(self._key("waiting"), caller)

    def _unqueue(self, pipe: Pipeline, job: str, caller: str, left: dict[str, int]) -> None:
        pipe.zrem(self._key("queued", caller), job)
        left[caller] -= 1
        if left[caller] == 0:
            pipe.srem(self._key("waiting"), caller)

    def _let_go(self, pipe: Pipeline, job: str) -> None:
        pipe.zrem(self._key("leases"), job)
        pipe.hdel(self._key("held"), job)

    def _held(self, client: Redis) -> list[str]:
        return list(client.zrange(self._key("leases"), 0, -1))

    def _counts(self, client: Redis) -> dict[str, int]:
        counts: dict[str, int] = {}
        for caller in client.hvals(self._key("held")):
            counts[caller] = counts.get(caller, 0) + 1
        return counts

    def _read(self, client: Redis, job: str) -> Job | None:
        return _job(_COLUMNS, client.hmget(self._job(job), _COLUMNS))

    def _lights(self, ids: list[str]) -> list[Job]:
        """Without their pictures."""
        with self._redis.pipeline(transaction=False) as pipe:
            for job in ids:
                pipe.hmget(self._job(job), _LIGHT)
            found = [_job(_LIGHT, row) for row in pipe.execute()] if ids else []
        return [job for job in found if job is not None]

    def _job(self, job: str) -> str:
        return self._key("job", job)

    def _key(self, *parts: str) -> str:
        # Callers' names have no colon; a client's Idempotency-Key may, and stands last.
        return self._prefix + ":".join(parts)


def connect_redis(spec: RedisSpec, environ: Mapping[str, str]) -> Redis:
    """Connects with the first command, and again after a loss.

    Raises:
        PolicyError: the environment lacks the password.
    """
    password = spec.password("gateway_redis", environ)
    # The library's own would hold the one thread of all jobs for up to half a minute.
    retry = Retry(ExponentialBackoff(cap=0.5, base=0.05), 3)
    return redis.Redis(
        host=spec.host, port=spec.port, password=password, socket_timeout=5.0, decode_responses=True, retry=retry
    )


def _stored(job: Job) -> dict[str, str | int | float]:
    values = {name: getattr(job, name) for name in _COLUMNS}
    return {name: value for name, value in values.items() if value is not None}


def _job(names: tuple[str, ...], row: list[str | None]) -> Job | None:
    values: dict[str, Any] = {}
    for name, raw in zip(names, row, strict=True):
        if raw is not None:
            values[name] = float(raw) if name in _TIMES else _NUMBERS.get(name, str)(raw)
    if "id" not in values:
        return None
    return Job(**{"webhook_url": None, **values, "status": JobStatus(values["status"])})
