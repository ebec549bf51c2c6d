"""What one gateway knows of the places that can answer: pools, providers, and the orders that it follows.

Kept by the gateway's event loop alone; routing sees it as an immutable `View`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from tidegate.arbiter.messages import Orders, PoolLoad, ProviderSeen, Spillway
from tidegate.ids import Generation, PoolName, ProviderName
from tidegate.serve import cooldown
from tidegate.serve.admission import parse_size
from tidegate.serve.cooldown import Cooldown
from tidegate.serve.providers.fields import honours
from tidegate.serve.providers.parity import Look
from tidegate.serve.routing import PoolView, ProviderView, ToLocal, ToProvider, View
from tidegate.serve.timeouts import KEPT, too_tight
from tidegate.serve.work import Size
from tidegate.spec.providers import ProviderSpec

UNTIL_TOLD = Orders(generation=Generation(0), spillway=Spillway.CLOSED, allowances={})
"""What a gateway does before the arbiter's first word: use all that runs, spill only before failing."""

_WEIGHT = 0.2
"""Of the newest value in the running means of service time and latency: about the last five count."""


@dataclass(frozen=True, slots=True)
class PoolSeen:
    """One pool as this gateway's lines to its replicas see it now."""

    replicas: int
    """Running."""
    ongoing: int
    """Over all running replicas, other gateways' requests too."""
    slots_each: int
    """Requests that one replica takes at a time."""


@dataclass(slots=True)
class _Pool:
    ongoing: int = 0
    """Placed by this gateway and not done."""
    service_s: float | None = None
    resting_until_s: float = 0.0


@dataclass(slots=True)
class _Provider:
    spec: ProviderSpec
    sizes: frozenset[Size] | None
    honours: frozenset[str]
    prices_usd: Mapping[Size, float]
    models: frozenset[str]
    ongoing: int = 0
    latency_s: float | None = None
    took_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    """Of its newest answers."""
    trouble: Cooldown = field(default_factory=Cooldown)
    look: Look = field(default_factory=Look)
    """What canaries said of its pictures."""

    @classmethod
    def of(cls, spec: ProviderSpec) -> _Provider:
        return cls(
            spec,
            sizes=None if spec.sizes is None else frozenset(parse_size(size) for size in spec.sizes),
            honours=honours(spec),
            prices_usd={parse_size(size): price for size, price in spec.prices_usd.items()},
            models=frozenset(spec.models),
        )


class Backends:
    """`read_pools` gives the newest sight of each pool's replicas; it must be cheap, it is asked for every view."""

    def __init__(
        self, providers: Iterable[ProviderSpec], read_pools: Callable[[], Mapping[PoolName, PoolSeen]]
    ) -> None:
        self._read_pools = read_pools
        self._pools: dict[PoolName, _Pool] = {}
        self._providers = {ProviderName(spec.name): _Provider.of(spec) for spec in providers}
        self.orders = UNTIL_TOLD

    def follow(self, orders: Orders) -> bool:
        """Take new orders; older ones than those followed are late and ignored. True if something changed."""
        if orders.generation < self.orders.generation or orders == self.orders:
            return False
        self.orders = orders
        return True

    def view(self, now_s: float) -> View:
        pools = tuple(self._pool_view(name, seen, now_s) for name, seen in self._read_pools().items())
        providers = tuple(
            ProviderView(
                name=name,
                ongoing=provider.ongoing,
                slots=provider.trouble.slots(provider.spec.slots),
                resting_until_s=provider.trouble.until_s,
                price_per_image_usd=provider.spec.price_per_image_usd,
                latency_s=provider.latency_s,
                models=provider.models,
                sizes=provider.sizes,
                honours=provider.honours,
                images_max=provider.spec.images_max,
                prices_usd=provider.prices_usd,
                closed=provider.look.closed,
            )
            for name, provider in self._providers.items()
        )
        return View(
            pools=pools,
            providers=providers,
            spillway=self.orders.spillway,
            over_budget=self.orders.over_budget,
        )

    def _pool_view(self, name: PoolName, seen: PoolSeen, now_s: float) -> PoolView:
        pool = self._pools.setdefault(name, _Pool())
        replicas = min(seen.replicas, self.orders.allowances.get(name, seen.replicas))
        # A request is at its replica a moment after it was placed; replicas tell of other gateways' ones.
        ongoing = max(seen.ongoing, pool.ongoing)
        free = replicas * seen.slots_each - ongoing if now_s >= pool.resting_until_s else 0
        return PoolView(
            pool=name, replicas=replicas, free_slots=max(0, free), ongoing=ongoing, service_s=pool.service_s
        )

    # What happens to a request

    def reserve(self, place: ToLocal | ToProvider) -> None:
        self._held(place).ongoing += 1

    def release(self, place: ToLocal | ToProvider) -> None:
        self._held(place).ongoing -= 1

    def _held(self, place: ToLocal | ToProvider) -> _Pool | _Provider:
        match place:
            case ToLocal(pool):
                return self._pools.setdefault(pool, _Pool())
            case ToProvider(provider):
                return self._providers[provider]

    def local_answered(self, pool: PoolName, compute_s: float) -> None:
        self._pools[pool].service_s = _mean(self._pools[pool].service_s, compute_s)

    def rest_pool(self, pool: PoolName, until_s: float) -> None:
        """Leave the pool alone for a moment: what we know of it was just proven old."""
        self._pools[pool].resting_until_s = until_s

    def provider_answered(self, provider: ProviderName, now_s: float, took_s: float) -> None:
        known = self._providers[provider]
        known.latency_s = _mean(known.latency_s, took_s)
        known.took_s.append(took_s)
        known.trouble = cooldown.answered(known.trouble, now_s)

    def provider_failed(self, provider: ProviderName, now_s: float, reason: str, retry_after_s: float | None) -> None:
        known = self._providers[provider]
        known.trouble = cooldown.failed(
            known.trouble, now_s, cooldown_s=known.spec.cooldown_s, retry_after_s=retry_after_s, reason=reason
        )

    def provider_looked(self, provider: ProviderName, look: Look) -> None:
        """What its newest canary's pictures mean."""
        self._providers[provider].look = look

    def trouble_of(self, provider: ProviderName) -> Cooldown:
        return self._providers[provider].trouble

    def repeats(self, provider: ProviderName) -> bool:
        """It can make the same picture again: it takes a seed."""
        return "seed" in self._providers[provider].honours

    def look_of(self, provider: ProviderName) -> Look:
        return self._providers[provider].look

    def price_usd(self, provider: ProviderName, images: int, size: Size) -> float:
        known = self._providers[provider]
        return known.prices_usd.get(size, known.spec.price_per_image_usd) * images

    def timeout_s(self, provider: ProviderName) -> float:
        return self._providers[provider].spec.timeout_s

    # What the arbiter hears

    def pool_loads(self) -> tuple[PoolLoad, ...]:
        """Replicas as they run (not as allowed), and this gateway's own requests at each pool."""
        return tuple(
            PoolLoad(pool=name, replicas=seen.replicas, ongoing=self._pools.get(name, _Pool()).ongoing)
            for name, seen in self._read_pools().items()
        )

    def providers_seen(self, now_s: float) -> tuple[ProviderSeen, ...]:
        return tuple(
            ProviderSeen(
                name=name,
                state=self._state(provider, now_s),
                why=self._why(provider, now_s),
                ongoing=provider.ongoing,
                slots=provider.spec.slots,
                price_per_image_usd=provider.spec.price_per_image_usd,
                latency_s=provider.latency_s,
            )
            for name, provider in self._providers.items()
        )

    def _state(self, provider: _Provider, now_s: float) -> str:
        return "suspect" if provider.look.closed or provider.trouble.resting(now_s) else self.orders.spillway.value

    def _why(self, provider: _Provider, now_s: float) -> str:
        trouble = provider.trouble
        if provider.look.closed:
            return provider.look.closed
        if trouble.resting(now_s):
            return f"rests for {trouble.until_s - now_s:.0f} s: {trouble.reason}"
        if trouble.failures:
            return f"one request at a time until one succeeds, after {trouble.failures} failures: {trouble.reason}"
        if self.orders.over_budget is not None and provider.spec.price_per_image_usd > 0:
            return f"over budget: {self.orders.over_budget.reason}"
        tight = too_tight(provider.spec.timeout_s, list(provider.took_s))
        if tight is not None:
            return tight
        return "local GPUs are full or lent" if self.orders.spillway is Spillway.OPEN else "local GPUs have room"

    def way_exists(self, now_s: float) -> bool:
        """Some replica may be used, or some provider isn't resting."""
        view = self.view(now_s)
        return any(pool.replicas > 0 for pool in view.pools) or any(
            provider.closed is None and now_s >= provider.resting_until_s for provider in view.providers
        )


def _mean(before: float | None, value: float) -> float:
    return value if before is None else before + _WEIGHT * (value - before)
