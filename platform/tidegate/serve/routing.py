"""Where a request goes now. Pure: `pick(request, view, now_s)` is the only place that chooses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

from tidegate.arbiter.messages import OverBudget, Spillway
from tidegate.ids import PoolName, ProviderName
from tidegate.serve.work import Size


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolView:
    pool: PoolName
    replicas: int
    """Running, capped by the orders' allowance."""
    free_slots: int
    """Requests that it would take now, within the allowance."""
    ongoing: int
    service_s: float | None = None
    """Recent seconds of work for one request on one replica; None = nothing measured yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderView:
    name: ProviderName
    ongoing: int
    slots: int
    """How many it may hold now (one at a time after a failure)."""
    resting_until_s: float
    """Not to be asked before; 0 = in good standing."""
    price_per_image_usd: float
    latency_s: float | None
    models: frozenset[str]
    sizes: frozenset[Size] | None
    """None = all."""
    honours: frozenset[str] | None = None
    """Fields that it has a word for (`providers.fields`); None = all."""
    images_max: int | None = None
    """In one request."""
    prices_usd: Mapping[Size, float] = field(default_factory=dict)
    """Of one image, where it depends on the size."""
    closed: str | None = None
    """Why it takes nothing, whoever asks (its pictures have drifted, say)."""

    def price_usd(self, size: Size) -> float:
        return self.prices_usd.get(size, self.price_per_image_usd)


# No slots: what all picks of one view share is summed up once, so a pick costs the same for any number of pools.
@dataclass(frozen=True, kw_only=True)
class View:
    pools: tuple[PoolView, ...]
    providers: tuple[ProviderView, ...]
    spillway: Spillway
    over_budget: OverBudget | None = None
    """The purse is empty: nothing is bought."""

    @cached_property
    def all_pools(self) -> PoolsSum:
        return _sum(self.pools)

    def pools_for(self, request: RouteRequest) -> PoolsSum:
        if not request.excluded_pools:
            return self.all_pools
        return _sum(tuple(pool for pool in self.pools if pool.pool not in request.excluded_pools))


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolsSum:
    """Some pools together."""

    roomiest: PoolName | None
    """The one to choose among those with a free slot."""
    exist: bool
    replicas: int
    rate: float
    """Requests a second that their replicas work off; 0 where nothing was measured yet, or only in a part of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteRequest:
    """What routing needs to know of a request. `excluded_*` and `bought` hold what its attempts taught."""

    model: str
    size: Size
    accepted_at_s: float
    patience_until_s: float
    """Until here it waits for a local replica while the spillway is closed."""
    deadline_s: float
    """Absolute; shared by all attempts."""
    local_only: bool = False
    priority: int = 0
    """Lower ones stand before higher ones in the line."""
    bought: bool = False
    """A provider may have charged for it and its answer was lost: it is never bought again (C160)."""
    excluded_pools: frozenset[PoolName] = frozenset()
    excluded_providers: frozenset[ProviderName] = frozenset()
    needs: frozenset[str] = frozenset()
    """Fields that the client named: a provider without a word for one of them would silently make something else."""
    images: int = 1
    hedge_after_s: float | None = None
    """It may be made, and bought, twice: a second place may be asked once the first has had it so long. None = not."""

    @property
    def may_leave(self) -> bool:
        return not self.local_only and not self.bought


@dataclass(frozen=True, slots=True)
class ToLocal:
    pool: PoolName


@dataclass(frozen=True, slots=True)
class ToProvider:
    provider: ProviderName


@dataclass(frozen=True, slots=True)
class Wait:
    until_s: float
    """Time alone changes nothing before this; a freed slot or new orders may."""


@dataclass(frozen=True, slots=True)
class Reject:
    reason: str
    retry_after_s: float
    over_budget: bool = False
    """It could have been made, for money that may not be spent."""


Step: TypeAlias = ToLocal | ToProvider | Wait | Reject


def pick(request: RouteRequest, view: View, now_s: float, ahead: int = 0) -> Step:
    """Where `request` goes now; `ahead` requests wait before it for the same places.

    - A free local slot within the allowance wins; a pool without replicas is never chosen.
    - Spillway open: else the cheapest provider that can make it, at once.
    - Spillway closed: it waits for a local replica while that can keep its patience, then spills before it fails.
    - Over budget: what would be bought is rejected instead, once no replica can be waited for any more.
    - All providers resting is no error while one comes back before the deadline (C155).
    - At the deadline it is rejected, and told when to come back.
    """
    if now_s >= request.deadline_s:
        return Reject("no replica and no provider took it before its deadline", _come_back_s(request, view, now_s))
    pools = view.pools_for(request)
    if pools.roomiest is not None:
        return ToLocal(pools.roomiest)
    capable = [provider for provider in view.providers if _can_make(provider, request)]
    if not pools.exist and not capable:
        return Reject("nothing here can make it", _come_back_s(request, view, now_s))
    payable = [p for p in capable if view.over_budget is None or p.price_usd(request.size) == 0]
    spill_at_s = _spill_at_s(request, view, pools, now_s, ahead)
    if now_s >= spill_at_s:
        ready = [p for p in payable if now_s >= p.resting_until_s and p.ongoing < p.slots]
        if ready:
            return ToProvider(min(ready, key=lambda provider: _cheapness(provider, request.size)).name)
        if view.over_budget is not None and capable and not payable:
            return Reject(view.over_budget.reason, max(1.0, view.over_budget.until_s - now_s), over_budget=True)
        if not pools.exist and all(p.resting_until_s >= request.deadline_s for p in payable):
            return Reject("every provider rests beyond its deadline", _come_back_s(request, view, now_s))
    changes = [provider.resting_until_s for provider in payable] + [spill_at_s, request.deadline_s]
    return Wait(min(at_s for at_s in changes if at_s > now_s))


def _sum(pools: tuple[PoolView, ...]) -> PoolsSum:
    free = [pool for pool in pools if pool.replicas > 0 and pool.free_slots > 0]
    measured = all(pool.service_s for pool in pools if pool.replicas)
    rate = sum(pool.replicas / pool.service_s for pool in pools if pool.service_s)
    return PoolsSum(
        roomiest=max(free, key=_room).pool if free else None,
        exist=bool(pools),
        replicas=sum(pool.replicas for pool in pools),
        rate=rate if measured else 0.0,
    )


def _room(pool: PoolView) -> tuple[int, float, str]:
    """Most free slots, then the quickest; the name only settles ties, so that equal views give equal answers."""
    return (pool.free_slots, -(pool.service_s or 0.0), pool.pool)


def _cheapness(provider: ProviderView, size: Size) -> tuple[float, float, float, str]:
    return (
        provider.price_usd(size),
        provider.ongoing / provider.slots,
        provider.latency_s or 0.0,
        provider.name,
    )


def _can_make(provider: ProviderView, request: RouteRequest) -> bool:
    return (
        request.may_leave
        and provider.closed is None
        and provider.name not in request.excluded_providers
        and request.model in provider.models
        and (provider.sizes is None or request.size in provider.sizes)
        and (provider.honours is None or request.needs <= provider.honours)
        and (provider.images_max is None or request.images <= provider.images_max)
    )


def _spill_at_s(request: RouteRequest, view: View, pools: PoolsSum, now_s: float, ahead: int) -> float:
    """From when on a provider may take it."""
    if not pools.exist or (view.spillway is Spillway.OPEN and (view.over_budget is None or not pools.replicas)):
        return now_s
    # Capacity, before errors: a queue that can't be worked off within its patience isn't waited for. Queue ÷ rate:
    # those ahead and this one leave at Σ replicas/service_s. Unknown counts as no wait at all.
    if pools.rate and now_s + (ahead + 1) / pools.rate > request.patience_until_s:
        return now_s
    return request.patience_until_s


def _come_back_s(request: RouteRequest, view: View, now_s: float) -> float:
    """Seconds until a capable provider is back, else one second."""
    rests = [p.resting_until_s - now_s for p in view.providers if _can_make(p, request)]
    return max(1.0, min((rest for rest in rests if rest > 0), default=1.0))


def wait_is_for_all(view: View, now_s: float) -> bool:
    """No slot is free anywhere: whoever comes after a request that waits, waits as well (the queue need not be read
    to its end). Over budget it must be: there each one's patience ends in a refusal of its own."""
    if view.over_budget is not None:
        return False
    outside = any(p.closed is None and now_s >= p.resting_until_s and p.ongoing < p.slots for p in view.providers)
    return view.all_pools.roomiest is None and not outside
