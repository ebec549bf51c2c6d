"""Takes jobs from the store, has them made at the desk, and tells their callers. What it knows, the store knows."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import random
import uuid
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import httpx

from tidegate.ids import GatewayId
from tidegate.serve.api import ApiError, ImagesBody, parse_body
from tidegate.serve.callers import Caller, Callers
from tidegate.serve.desk import Desk, pictures_in
from tidegate.serve.job_store import JobStore, KeyReusedError
from tidegate.serve.jobs import Job, JobStatus, shown
from tidegate.serve.pictures import images_answer
from tidegate.serve.repeats import KEY_CHARS_MAX
from tidegate.serve.webhooks import delay_s, deliver, event, event_id, origin_of, signed
from tidegate.spec.jobs import JobsSpec
from tidegate.spec.policy import Policy

if TYPE_CHECKING:
    from tidegate.serve.redis_job_store import RedisJobStore

T = TypeVar("T")

LOOK_S = 0.5
"""Between two looks at the store: for jobs of other gateways, due webhooks and leases."""

FORGET_S = 60.0
"""Between two clearings of the store."""

_LOG = logging.getLogger("ray.serve")

_LOST = ApiError(504, "its gateway ended while a provider was making it", code="answer_lost", retry=False)


_NOT_KEPT = {"user", "safety_identifier"}
"""Names of the caller's own users, which no picture needs."""


class JobBody(ImagesBody):
    """The body of `POST /v1/images/jobs`."""

    webhook_url: str | None = None


class Jobs:
    def __init__(self, spec: JobsSpec, store: JobStore | RedisJobStore, desk: Desk, callers: Callers) -> None:
        self._spec, self._store, self._desk, self._callers = spec, store, desk, callers
        self._clock = desk.clock
        # SQLite blocks, and its connection wants one thread.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="jobs")
        self._client = httpx.AsyncClient(trust_env=False)
        self._at_work: dict[str, asyncio.Task[None]] = {}
        self._delivering: set[asyncio.Task[None]] = set()
        self._cancelled: set[str] = set()
        self._look = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None
        self._forget_at_s = 0.0

    def start(self) -> None:
        """Begin to make jobs, in the running event loop."""
        self._looking = self._spawn(self._look_for_ever())

    async def aclose(self) -> None:
        """Stop. What runs goes back to the queue, unless a provider may have been paid for it."""
        if self._looking is not None:
            await _ended(self._looking)  # before its tasks, so that it starts no more
        await _ended(*self._at_work.values(), *self._delivering)
        try:
            await self._in_store(partial(self._store.recover, self._clock.now_s(), _error(_LOST), mine=True))
        except Exception:
            # A store that is away must not keep the rest from ending; their leases end by themselves.
            _LOG.exception("jobs: those in hand could not be given back at once")
        await self._in_store(self._store.close)
        self._thread.shutdown()
        await self._client.aclose()

    # What callers ask

    async def submit(self, raw: bytes, caller: Caller, key: str | None) -> dict[str, Any]:
        """Check and store a job.

        Raises:
            ApiError: 400 and 404 as for a request, 422 for a key with another body, 429 where too many wait.
        """
        body = parse_body(raw, JobBody)
        now_s, seed = self._clock.now_s(), random.randrange(2**31)
        job = Job(
            id=f"job-{uuid.uuid4().hex}",
            caller=caller.name,
            priority=caller.priority,
            body=body.model_dump_json(exclude_none=True, exclude=_NOT_KEPT),
            model=self._desk.limits.model,
            seed=seed,
            webhook_url=body.webhook_url,
            created_at_s=now_s,
        )
        self._desk.admitted(body, job.request, caller, 0, seed)
        if body.stream:
            raise ApiError(400, "'stream': a job's pictures are fetched; leave it out", param="stream")
        _check_webhook(body.webhook_url, caller)
        if key is not None and not 0 < len(key) <= KEY_CHARS_MAX:
            raise ApiError(400, f"'Idempotency-Key' must have 1 to {KEY_CHARS_MAX} characters", code="invalid_header")
        await self._callers.count(caller, now_s)
        store = partial(self._store.submit, job, self._spec.waiting_max, key, hashlib.sha256(raw).digest())
        try:
            stored = await self._in_store(store)
        except KeyReusedError:
            why = "this Idempotency-Key was used for another body; take a new key"
            raise ApiError(422, why, code="idempotency_key_reused", retry=False) from None
        if stored is None:
            why = f"{self._spec.waiting_max} of this key's jobs wait already; try again later"
            raise ApiError(429, why, code="rate_limit_exceeded", retry_after_s=10.0)
        self._look.set()
        return await self._shown(stored, full=True)

    async def fetch(self, job: str, caller: Caller) -> dict[str, Any]:
        """Raises:
        ApiError: 404.
        """
        return await self._shown(
            _there(await self._in_store(partial(self._store.find, job, caller.name)), job), full=True
        )

    async def cancel(self, job: str, caller: Caller) -> dict[str, Any]:
        """As `fetch`; an ended one stays as it is."""
        found = _there(await self._in_store(partial(self._store.cancel, job, caller.name, self._clock.now_s())), job)
        task = self._at_work.get(job)
        if task is not None and found.status is JobStatus.RUNNING:
            self._cancelled.add(job)
            task.cancel()
            await asyncio.wait([task])
            return await self.fetch(job, caller)
        self._look.set()
        return await self._shown(found, full=True)

    async def listed(
        self, caller: Caller, *, after: str | None, limit: int, status: JobStatus | None
    ) -> dict[str, Any]:
        statuses = tuple(JobStatus) if status is None else (status,)
        jobs = await self._in_store(
            partial(self._store.listed, caller.name, after=after, limit=limit + 1, statuses=statuses)
        )
        if jobs is None:
            # To begin anew would be to list for ever.
            raise ApiError(400, f"'after': there is no job '{str(after)[:60]}'", param="after", code="invalid_value")
        data = [await self._shown(job, full=False) for job in jobs[:limit]]
        return {
            "object": "list",
            "data": data,
            "first_id": data[0]["id"] if data else None,
            "last_id": data[-1]["id"] if data else None,
            "has_more": len(jobs) > limit,
        }

    async def _shown(self, job: Job, *, full: bool) -> dict[str, Any]:
        backlogged = False
        if job.status is JobStatus.QUEUED:
            most = self._callers.jobs_running_max().get(job.caller)
            running = await self._in_store(self._store.running)
            backlogged = most is not None and running.get(job.caller, 0) >= most
        return shown(job, full=full, keep_s=self._spec.keep_s, backlogged=backlogged)

    # What happens by itself

    async def _look_for_ever(self) -> None:
        while True:
            self._look.clear()
            try:
                await self._look_once()
            except Exception:
                # A full or locked disk must not end the runner; it looks again.
                _LOG.exception("jobs: the store could not be read or written")
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._look.wait()
            except TimeoutError:
                pass

    async def _look_once(self) -> None:
        now_s = self._clock.now_s()
        for job in await self._in_store(partial(self._store.renew, now_s)):
            if job in self._at_work:
                self._cancelled.add(job)
                self._at_work[job].cancel()
        if given_back := await self._in_store(partial(self._store.recover, now_s, _error(_LOST))):
            _LOG.warning("jobs: took %d over from a gateway that is gone", given_back)
        free = self._spec.running_max - len(self._at_work)
        for one in await self._in_store(partial(self._store.start, now_s, self._callers.jobs_running_max(), free)):
            task = self._spawn(self._run(one))
            self._at_work[one.id] = task
            task.add_done_callback(partial(self._done, one.id))
        hold_s = 2 * self._spec.webhook_timeout_s
        for one in await self._in_store(partial(self._store.due_deliveries, now_s, hold_s, 16)):
            task = self._spawn(self._tell(one))
            self._delivering.add(task)
            task.add_done_callback(self._delivering.discard)
        if now_s >= self._forget_at_s:
            self._forget_at_s = now_s + FORGET_S
            await self._in_store(partial(self._store.forget, now_s - self._spec.keep_s))

    def _done(self, job: str, _: asyncio.Task[None]) -> None:
        del self._at_work[job]
        self._cancelled.discard(job)
        self._look.set()

    async def _run(self, job: Job) -> None:
        accepted_at_s = self._clock.now_s()
        status, values = JobStatus.FAILED, dict[str, object]()
        try:
            with self._desk.booked(job.request, accepted_at_s) as entry:
                body = parse_body(job.body.encode(), JobBody)
                admitted = self._desk.admitted(body, job.request, self._callers.named(job.caller), 0, job.seed)
                answer = entry.answer = await self._desk.flow.answer(
                    admitted.job,
                    accepted_at_s,
                    deadline_s=job.created_at_s + self._spec.deadline_s,
                    buying=partial(self._buying, job.id),
                )
                pictures = await pictures_in(admitted.reply, answer)
            images = images_answer(answer.made, pictures, admitted.job.size, admitted.reply, self._clock.now_s())
            values = {"answer": json.dumps(images), "backend": answer.backend, "computed_s": answer.computed_s}
            status = JobStatus.SUCCEEDED
        except ApiError as error:
            values = {"error": _error(error)}
        except asyncio.CancelledError:
            if job.id not in self._cancelled:
                raise  # the gateway ends: `aclose` decides what becomes of it
            status = JobStatus.CANCELLED
        except Exception:
            _LOG.exception("job %s failed", job.id)
            values = {"error": _error(ApiError(500, "the gateway failed at this job; its log says why"))}
        if not await self._in_store(partial(self._store.end, job.id, self._clock.now_s(), status, **values)):
            _LOG.warning("job %s ended as %s here, but another gateway has taken it over", job.id, status)

    async def _buying(self, job: str, yes: bool) -> None:
        if not await self._in_store(partial(self._store.buying, job, yes)) and yes:
            # Held up for longer than its lease: whoever has it now may be buying it too.
            raise ApiError(504, "this job was taken over by another gateway", code="answer_lost", retry=False)

    async def _tell(self, job: Job) -> None:
        assert job.webhook_url is not None
        secret = self._callers.webhook_secret(job.caller)
        taken = False
        if secret is not None:
            body = event(job)
            headers = signed(secret, event_id(job), self._clock.now_s(), body)
            taken = await deliver(self._client, job.webhook_url, headers, body, self._spec.webhook_timeout_s)
        now_s, tried = self._clock.now_s(), job.deliveries + 1
        again = not taken and secret is not None and tried < self._spec.webhook_attempts_max
        await self._in_store(
            partial(
                self._store.delivered,
                job.id,
                delivered_at_s=now_s if taken else None,
                next_at_s=now_s + delay_s(tried, random.random()) if again else None,
            )
        )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(work)

    async def _in_store(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)


def open_jobs(policy: Policy, desk: Desk, callers: Callers, gateway: GatewayId) -> Jobs:
    """This gateway's jobs. The owner's name is new for each process: one that comes back is another one."""
    spec = policy.jobs
    owner = f"{gateway}/{os.getpid()}/{uuid.uuid4().hex[:8]}"
    return Jobs(spec, _store(policy, owner), desk, callers)


def _store(policy: Policy, owner: str) -> JobStore | RedisJobStore:
    redis, lease_s = policy.gateway_redis, policy.jobs.lease_s
    if redis is None:
        return JobStore(policy.jobs.store_path or policy.arbiter.state_path / "jobs.sqlite", owner, lease_s)
    from tidegate.serve.redis_job_store import RedisJobStore, connect_redis  # an extra: only where it is configured

    return RedisJobStore(connect_redis(redis, os.environ), redis.namespace, owner, lease_s)


async def _ended(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _there(job: Job | None, name: str) -> Job:
    if job is None:
        raise ApiError(404, f"there is no job '{name[:60]}' of this key's", param="id", code="job_not_found")
    return job


def _check_webhook(url: str | None, caller: Caller) -> None:
    if url is None:
        return
    if origin_of(url) not in caller.webhook_origins:
        known = ", ".join(caller.webhook_origins) or "none"
        why = f"'webhook_url': must begin with one of this key's webhook_origins: {known}"
        raise ApiError(400, why, param="webhook_url", code="invalid_value")


def _error(error: ApiError) -> str:
    return json.dumps(error.body()["error"])
