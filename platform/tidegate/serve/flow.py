"""One request's walk: placed, tried, perhaps tried elsewhere, ended once. Knows no Ray: the pools are given to it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias

from tidegate.arbiter.messages import CanaryResult
from tidegate.clock import Clock
from tidegate.ids import PoolName, ProviderName, RequestId
from tidegate.serve.api import ApiError
from tidegate.serve.backends import Backends
from tidegate.serve.demand import Demand
from tidegate.serve.dispatch import Dispatcher
from tidegate.serve.hedging import hedge_at_s
from tidegate.serve.ledger import CANARY, Attempt, AttemptOutcome, Ledger
from tidegate.serve.providers.base import ImageProvider, ProviderAmbiguousError, ProviderRefusedError, WrongPictureError
from tidegate.serve.providers.fields import wants
from tidegate.serve.routing import Reject, RouteRequest, ToLocal, ToProvider
from tidegate.serve.timeouts import attempt_s
from tidegate.serve.work import EngineFailedError, ImageJob, Made, Partial, PoolBusyError, PoolLostError, UnfitError
from tidegate.spec.policy import ServingSpec

REST_S = 0.03
"""A pool that was not as free, or not as alive, as it looked is looked at again after this."""

REPLICAS_LEFT = "replicas_left"
"""The error code of a request that was tried, and of which only replicas that went away know."""

LOST_MAX = 3
"""Replicas that may die with one request before it is taken for the cause and kept from replicas."""


class LocalPools(Protocol):
    async def make(self, pool: PoolName, job: ImageJob, timeout_s: float) -> Made:
        """Make the pictures on one replica of `pool`.

        Raises:
            PoolBusyError, PoolLostError, EngineFailedError: see `work`.
            UnfitError: see `work`.
            TimeoutError: not done in time; the replica was told to stop.
        """

    async def make_shown(self, pool: PoolName, job: ImageJob, timeout_s: float, show: Showing) -> Made:
        """As `make`; `show` is awaited with each unfinished picture as it comes."""


Showing: TypeAlias = Callable[[Partial], Awaitable[None]]

Buying: TypeAlias = Callable[[bool], Awaitable[None]]
"""Told True before a provider is asked, and False when it has clearly made nothing: what is written in between outlives
a gateway that dies with the provider's answer on its way."""


@dataclass(frozen=True, slots=True)
class Answer:
    made: Made
    backend: str
    """`local/<pool>` or `provider/<name>`."""
    queued_s: float
    """From accepting the request to the start of the attempt that made it."""
    computed_s: float
    """GPU time here; at a provider, how long it took to answer."""


@dataclass(frozen=True, slots=True)
class CanaryPicture:
    """Neither where none came."""

    png: bytes | None = None
    wrong: str | None = None
    """What is wrong with one that can't even be compared."""


@dataclass(slots=True)
class _Walk:
    """What one request's attempts have taught."""

    job: ImageJob
    route: RouteRequest
    buying: Buying | None = None
    show: Showing | None = None
    shown: set[tuple[int, int]] = field(default_factory=set)
    """Unfinished pictures that the client has: (image, index)."""
    unfit: UnfitError | None = None
    attempts: int = 0
    """That did or may have done something."""
    lost: int = 0
    last: str = ""
    """Why the newest attempt failed."""


class Flow:
    def __init__(
        self,
        spec: ServingSpec,
        backends: Backends,
        local: LocalPools,
        providers: Mapping[ProviderName, ImageProvider],
        ledger: Ledger,
        clock: Clock,
    ) -> None:
        self._spec, self._backends, self._local, self._providers = spec, backends, local, providers
        self._ledger, self._clock = ledger, clock
        self.dispatcher = Dispatcher(backends, clock)
        self.demand = Demand(clock.now_s())

    def spent_usd(self, provider: ProviderName | None = None) -> float:
        """Paid to one provider, or to all, by this gateway's ledger."""
        return self._ledger.spent_usd(None if provider is None else backend_name(ToProvider(provider)))

    async def answer(
        self,
        job: ImageJob,
        accepted_at_s: float,
        *,
        deadline_s: float | None = None,
        buying: Buying | None = None,
        show: Showing | None = None,
    ) -> Answer:
        """Make the job's pictures somewhere. Writes its attempts, not its end.

        `deadline_s` is absolute; none = the policy's. `buying` hears of each paid attempt before it is made, `show`
        gets each unfinished picture once. After the first one nobody else's picture will do: only replicas may go on.

        Raises:
            ApiError: 400 where it fits into no replica's memory, 503 where nothing took it in time, 429 where it would
                have cost money that may not be spent, 502/504 where what took it failed.
        """
        route = RouteRequest(
            model=job.model,
            size=job.size,
            accepted_at_s=accepted_at_s,
            patience_until_s=accepted_at_s + self._spec.patience_s,
            deadline_s=accepted_at_s + self._spec.request_deadline_s if deadline_s is None else deadline_s,
            local_only=job.local_only,
            priority=job.priority,
            needs=wants(job),
            images=job.images,
            hedge_after_s=self._spec.hedge_after_s if job.hedge else None,
        )
        walk = _Walk(job, route, buying, show)
        while True:
            place = await self.dispatcher.place(walk.route)
            if isinstance(place, Reject):
                raise _gave_up(walk, place)
            answer = await self._tried(walk, place)
            if answer is not None:
                return answer

    async def _tried(self, walk: _Walk, first: ToLocal | ToProvider) -> Answer | None:
        """One try, or two beside each other where that is allowed and the first is slow: the first answer counts, and
        the other try is cancelled. None = what was tried failed."""
        at_s = hedge_at_s(walk.route, self._clock.now_s())
        # A stream shows what one place makes; a job has time, and says to the store that one purchase is under way.
        if at_s is None or walk.buying is not None or walk.show is not None:
            try:
                return await self._attempt_at(walk, first)
            finally:
                self.dispatcher.done(first)
        trying = [self._begin(walk, first)]
        try:
            await asyncio.wait(trying, timeout=at_s - self._clock.now_s())
            second = None if trying[0].done() else self.dispatcher.place_second(walk.route, first)
            if second is not None:
                trying.append(self._begin(walk, second, hedge=True))
            for done in asyncio.as_completed(trying):
                answer = await done
                if answer is not None:
                    return answer
            return None
        finally:
            for task in trying:
                task.cancel()
            await asyncio.gather(*trying, return_exceptions=True)

    def _begin(self, walk: _Walk, place: ToLocal | ToProvider, *, hedge: bool = False) -> asyncio.Task[Answer | None]:
        task = asyncio.get_running_loop().create_task(self._attempt_at(walk, place, hedge=hedge))
        # Not in the task: one that is cancelled before its first step never runs.
        task.add_done_callback(lambda _: self.dispatcher.done(place))
        return task

    async def _attempt_at(self, walk: _Walk, place: ToLocal | ToProvider, *, hedge: bool = False) -> Answer | None:
        started_at_s = self._clock.now_s()
        made = await self._attempt(walk, place, hedge)
        if made is None:
            return None
        computed_s = made.compute_s or self._clock.now_s() - started_at_s
        return Answer(made, backend_name(place), started_at_s - walk.route.accepted_at_s, computed_s)

    async def _attempt(self, walk: _Walk, place: ToLocal | ToProvider, hedge: bool) -> Made | None:
        """One try; None = it failed, and `walk` has learnt from it."""
        started_at_s = self._clock.now_s()
        price_usd, compute_s = 0.0, 0.0
        outcome, reason = AttemptOutcome.ERROR, None
        try:
            match place:
                case ToLocal(pool):
                    made = await self._try_local(walk, pool, started_at_s)
                    compute_s = made.compute_s
                case ToProvider(provider):
                    if walk.buying is not None:
                        await walk.buying(True)
                    price_usd = self._backends.price_usd(provider, walk.job.images, walk.job.size)
                    made = await self._try_provider(walk, provider, started_at_s)
            outcome = AttemptOutcome.ANSWERED
            return made
        except asyncio.CancelledError:
            outcome = AttemptOutcome.CANCELLED
            raise
        except PoolBusyError:
            outcome = AttemptOutcome.BUSY
        except UnfitError as error:
            outcome, reason, walk.unfit = AttemptOutcome.REFUSED, error.why, error
        except (PoolLostError, ProviderAmbiguousError) as error:
            outcome, reason = AttemptOutcome.LOST, str(error)
        except ProviderRefusedError as error:
            outcome, reason, price_usd = AttemptOutcome.REFUSED, str(error), 0.0
        except (EngineFailedError, TimeoutError) as error:
            outcome, reason = AttemptOutcome.ERROR, str(error) or "not done before the deadline"
        finally:
            if outcome is not AttemptOutcome.BUSY:  # nothing was done: no attempt to speak of
                walk.attempts, walk.last = walk.attempts + 1, reason or walk.last
                self._ledger.attempt(
                    Attempt(
                        request=walk.job.request,
                        attempt=walk.attempts,
                        backend=backend_name(place),
                        started_at_s=started_at_s,
                        ended_at_s=self._clock.now_s(),
                        outcome=outcome,
                        reason=reason,
                        price_usd=price_usd,
                        compute_s=compute_s,
                        hedge=hedge,
                    )
                )
        return None

    async def _try_local(self, walk: _Walk, pool: PoolName, now_s: float) -> Made:
        try:
            made = await self._made_here(walk, pool, walk.route.deadline_s - now_s)
        except PoolBusyError:
            self._backends.rest_pool(pool, self._clock.now_s() + REST_S)
            raise
        except PoolLostError:
            self._backends.rest_pool(pool, self._clock.now_s() + REST_S)
            walk.lost += 1
            if walk.lost >= LOST_MAX:
                everywhere = frozenset(view.pool for view in self._backends.view(now_s).pools)
                walk.route = replace(walk.route, excluded_pools=everywhere)
            raise
        except (EngineFailedError, UnfitError):
            walk.route = replace(walk.route, excluded_pools=walk.route.excluded_pools | {pool})
            raise
        self._backends.local_answered(pool, made.compute_s)
        self.demand.made(self._clock.now_s(), walk.job.images, made.compute_s)
        return made

    async def _made_here(self, walk: _Walk, pool: PoolName, timeout_s: float) -> Made:
        outer = walk.show
        if outer is None or not walk.job.partial_images:
            return await self._local.make(pool, walk.job, timeout_s)

        async def show(part: Partial) -> None:
            if (part.image, part.index) not in walk.shown:  # else a replica was lost, and the next begins anew (C166)
                walk.shown.add((part.image, part.index))
                walk.route = replace(walk.route, local_only=True)
                await outer(part)

        return await self._local.make_shown(pool, walk.job, timeout_s, show)

    async def _try_provider(self, walk: _Walk, name: ProviderName, now_s: float) -> Made:
        timeout_s = attempt_s(self._backends.timeout_s(name), walk.route.deadline_s, now_s)
        try:
            made = await self._providers[name].make(walk.job, timeout_s=timeout_s, now_s=now_s)
        except ProviderRefusedError as error:
            if walk.buying is not None:
                await walk.buying(False)
            if error.this_request_only:
                walk.route = replace(walk.route, excluded_providers=walk.route.excluded_providers | {name})
            else:
                self._backends.provider_failed(name, self._clock.now_s(), error.why, error.retry_after_s)
            raise
        except ProviderAmbiguousError as error:
            walk.route = replace(walk.route, bought=True)
            self._backends.provider_failed(name, self._clock.now_s(), error.why, None)
            raise
        self._backends.provider_answered(name, self._clock.now_s(), self._clock.now_s() - now_s)
        return made

    async def canary(self, canary: str, job: ImageJob) -> tuple[CanaryResult, ...]:
        """Ask every provider for one small real picture, at the same time; resting ones too: this is how they are
        proven well again."""
        asked = await asyncio.gather(*(self.canary_of(name, canary, job) for name in self._providers))
        return tuple(result for result, _ in asked)

    async def canary_of(self, name: ProviderName, canary: str, job: ImageJob) -> tuple[CanaryResult, CanaryPicture]:
        """One provider's canary: did it answer, and what its picture was."""
        started_at_s = self._clock.now_s()
        job = replace(job, request=RequestId(f"{CANARY}{canary}-{name}"))
        walk = _Walk(job, _canary_route(job, started_at_s, self._backends.timeout_s(name)))
        outcome, picture = AttemptOutcome.ANSWERED, CanaryPicture()
        try:
            made = await self._try_provider(walk, name, started_at_s)
            picture = CanaryPicture(png=made.pngs[0])
            ok, detail = True, "made a picture"
        except ProviderRefusedError as error:
            ok, detail, outcome = False, error.why, AttemptOutcome.REFUSED
        except ProviderAmbiguousError as error:
            ok, detail, outcome = False, error.why, AttemptOutcome.LOST
            picture = CanaryPicture(wrong=error.why if isinstance(error, WrongPictureError) else None)
        except Exception as error:  # a fault of ours: still no way out was proven, and the claim must hear why
            ok, detail, outcome = False, f"{type(error).__name__}: {error}", AttemptOutcome.ERROR
        ended_at_s = self._clock.now_s()
        took_s = ended_at_s - started_at_s
        paid = outcome in (AttemptOutcome.ANSWERED, AttemptOutcome.LOST)
        self._ledger.attempt(
            Attempt(
                # Its time stands in the name: a gateway that comes back may be asked for the same canary again.
                request=RequestId(f"{job.request}@{started_at_s:.3f}"),
                attempt=1,
                backend=backend_name(ToProvider(name)),
                started_at_s=started_at_s,
                ended_at_s=ended_at_s,
                outcome=outcome,
                reason=None if ok else detail,
                price_usd=self._backends.price_usd(name, job.images, job.size) if paid else 0.0,
            )
        )
        return CanaryResult(canary=canary, provider=name, ok=ok, detail=detail, took_s=took_s), picture


def backend_name(place: ToLocal | ToProvider) -> str:
    match place:
        case ToLocal(pool):
            return f"local/{pool}"
        case ToProvider(provider):
            return f"provider/{provider}"


def _canary_route(job: ImageJob, now_s: float, timeout_s: float) -> RouteRequest:
    return RouteRequest(
        model=job.model,
        size=job.size,
        accepted_at_s=now_s,
        patience_until_s=now_s,
        deadline_s=now_s + timeout_s,
    )


def _gave_up(walk: _Walk, reject: Reject) -> ApiError:
    if walk.unfit is not None and not walk.route.bought:
        what = f"'{walk.unfit.param}': {walk.unfit.why}; ask for less"
        return ApiError(400, what, param=walk.unfit.param, code="does_not_fit")
    if not walk.attempts and reject.over_budget:
        return ApiError(429, reject.reason, code="over_budget", retry_after_s=reject.retry_after_s)
    if not walk.attempts:
        return ApiError(503, reject.reason, code="no_capacity", retry_after_s=reject.retry_after_s)
    tried = f"{reject.reason}; {walk.attempts} tried, last: {walk.last}"
    if walk.lost == walk.attempts < LOST_MAX:
        # Nothing is wrong with it: its replicas had to leave, and no other place took it in time.
        return ApiError(503, tried, code=REPLICAS_LEFT, retry_after_s=reject.retry_after_s)
    if walk.route.bought:
        # To ask again is to buy again: a person may choose that, a client library's retry may not.
        return ApiError(504, tried, code="answer_lost", retry=False)
    return ApiError(502, tried, code="backends_failed", retry_after_s=reject.retry_after_s)
