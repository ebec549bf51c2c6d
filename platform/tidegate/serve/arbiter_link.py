"""One gateway's talk with the arbiter: reports out, orders in, canaries when asked."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol

from tidegate.arbiter.messages import CanaryResult, GatewayReport, Orders, PoolPlan
from tidegate.clock import Clock
from tidegate.errors import NoArbiterError
from tidegate.ids import GatewayId, PoolName, RequestId
from tidegate.serve.admission import Limits
from tidegate.serve.backends import Backends
from tidegate.serve.flow import Flow
from tidegate.serve.tally import Tally
from tidegate.serve.work import ImageJob

EXCHANGE_S = 0.25
"""Between two words with the arbiter, which answers sooner when it has new orders."""

_LOG = logging.getLogger("ray.serve")


class Arbiter(Protocol):
    async def exchange(self, report: GatewayReport, wait_s: float) -> Orders: ...


class ArbiterLink:
    """Without an arbiter the last orders hold. `plan` says how its application's pools are built, `follow_pools` hears
    which there are."""

    def __init__(
        self,
        gateway: GatewayId,
        flow: Flow,
        backends: Backends,
        tally: Tally,
        limits: Limits,
        clock: Clock,
        plan: PoolPlan,
        follow_pools: Callable[[Iterable[PoolName]], None],
    ) -> None:
        self._plan, self._follow_pools = plan, follow_pools
        self._id, self._flow, self._backends, self._tally = gateway, flow, backends, tally
        self._limits, self._clock = limits, clock
        self._heard = True
        self._canary: str | None = None
        self._canaries: tuple[CanaryResult, ...] = ()
        self._canary_run: asyncio.Task[None] | None = None

    async def talk(self, arbiter: Arbiter) -> None:
        """Report and take orders, for ever."""
        while True:
            began_s = asyncio.get_running_loop().time()
            if not await self._exchange(arbiter, EXCHANGE_S):
                await asyncio.sleep(max(0.0, began_s + EXCHANGE_S - asyncio.get_running_loop().time()))

    async def _exchange(self, arbiter: Arbiter, wait_s: float) -> bool:
        """One report, and the orders that answer it; whether they are new. Then the arbiter waits for the next report:
        it acknowledges them."""
        try:
            orders = await arbiter.exchange(self._report(), wait_s)
        except NoArbiterError as error:
            self._hear(error)
            return False
        except Exception:
            # Whatever it is, requests must go on being answered, and the next word may succeed.
            _LOG.exception("gateway %s: exchange with the arbiter failed", self._id)
            return False
        self._hear(None)
        if not self._backends.follow(orders):
            return False
        self._follow_pools(orders.allowances)
        self._flow.dispatcher.look()
        self._start_canary(orders.canary, arbiter)
        return True

    def _hear(self, error: NoArbiterError | None) -> None:
        """Log a change only: it may be away for long."""
        if error is None and not self._heard:
            _LOG.info("gateway %s: the arbiter is back", self._id)
        elif error is not None and self._heard:
            _LOG.warning("gateway %s goes on with its last orders: %s", self._id, error)
        self._heard = error is None

    def _report(self) -> GatewayReport:
        now_s = self._clock.now_s()
        self._tally.waiting(self._flow.dispatcher.waiting)
        made_here = self._flow.demand.rate(now_s)
        return GatewayReport(
            gateway=self._id,
            at_s=now_s,
            acked=self._backends.orders.generation,
            pools=self._backends.pool_loads(),
            providers=tuple(
                replace(seen, spent_usd=self._flow.spent_usd(seen.name))
                for seen in self._backends.providers_seen(now_s)
            ),
            canaries=self._canaries,
            waiting=self._flow.dispatcher.waiting,
            answered_local_total=self._tally.local,
            answered_spilled_total=self._tally.spilled,
            refused_total=self._tally.refused,
            failed_total=self._tally.failed,
            spent_usd_total=self._flow.spent_usd(),
            local_images_per_s=made_here.images_per_s,
            local_busy_replicas=made_here.busy_replicas,
            plan=self._plan,
        )

    def _start_canary(self, canary: str | None, arbiter: Arbiter) -> None:
        """Once each name. The results are reported until the next name."""
        if canary is None or canary == self._canary:
            return
        self._canary = canary
        self._canary_run = asyncio.get_running_loop().create_task(self._prove_way_out(canary, arbiter))

    async def _prove_way_out(self, canary: str, arbiter: Arbiter) -> None:
        results = await self._flow.canary(canary, canary_job(self._limits))
        if canary == self._canary:  # else a newer one is under way
            self._canaries = results
            await self._exchange(arbiter, 0.0)  # beside `talk`, which may be waiting: a claim hangs on this


def canary_job(limits: Limits) -> ImageJob:
    """A request like any other, as small as the model allows."""
    return ImageJob(
        request=RequestId("canary"),
        model=limits.model,
        prompt="a small test picture",
        images=1,
        size=min(limits.sizes, key=lambda size: size.width * size.height),
        seed=0,
        seed_asked=False,
        steps=None,
        local_only=False,
    )
