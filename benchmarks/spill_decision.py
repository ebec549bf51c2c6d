"""One `pick` of the router: microseconds at 64 providers, and how they grow from 1,000 replicas to 16,000.

Eight replicas a pool, one pool a node, every slot taken, the spillway open: each request looks at all providers, half
of which can't honour it, a few rest or are full. The router picks for a whole line of waiting requests from one view,
so a pick's own cost is what a line costs divided by its length; `view_microseconds` is what a new view costs on top,
which does grow with the pools that it must read.

Takes about ten seconds on one core.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

from benchmarks.contract import figure, growth_exponent, publish

from tidegate.arbiter.messages import Orders, Spillway
from tidegate.ids import Generation, PoolName, ProviderName
from tidegate.serve.backends import Backends, PoolSeen
from tidegate.serve.routing import RouteRequest, ToProvider, View, pick
from tidegate.serve.work import Size
from tidegate.spec.providers import ProviderSpec

REPLICAS = (1_000, 2_000, 4_000, 8_000, 16_000)
REPLICAS_PER_POOL = 8
PROVIDERS = 64
LINE = 200
"""Requests that wait in one look."""
VIEWS = 10
NOW_S = 1_000.0

REQUEST = RouteRequest(
    model="m",
    size=Size(1024, 1024),
    accepted_at_s=NOW_S,
    patience_until_s=NOW_S + 10,
    deadline_s=NOW_S + 60,
    needs=frozenset({"size", "seed"}),
)


def backends(replicas: int) -> Backends:
    seen = {
        PoolName(f"pool-{number}"): PoolSeen(REPLICAS_PER_POOL, REPLICAS_PER_POOL, 1)
        for number in range(replicas // REPLICAS_PER_POOL)
    }
    house = Backends([_provider(number) for number in range(PROVIDERS)], lambda: seen)
    house.follow(Orders(generation=Generation(1), spillway=Spillway.OPEN, allowances={}))
    house.view(NOW_S)  # pools are known once they were seen
    for pool in seen:
        house.local_answered(pool, 2.0)
    for number in range(0, PROVIDERS, 8):
        house.provider_failed(name_of(number), NOW_S - 1, "status 500", 30.0)
    return house


def name_of(number: int) -> ProviderName:
    return ProviderName(f"provider-{number}")


def _provider(number: int) -> ProviderSpec:
    return ProviderSpec(
        name=name_of(number),
        base_url="http://127.0.0.1:9/v1",
        kind="openai" if number % 2 else "fal",
        fields={} if number % 2 else {"seed": ""},
        models={"m": "theirs"},
        price_per_image_usd=0.01 + number / 1000,
    )


def microseconds(work: Callable[[], object], times: int) -> float:
    """Of one call, the median of five series."""
    series = []
    for _ in range(5):
        began_s = time.perf_counter()
        for _ in range(times):
            work()
        series.append((time.perf_counter() - began_s) / times * 1e6)
    return statistics.median(series)


def new_view(house: Backends) -> object:
    return house.view(NOW_S).all_pools


def check(view: View) -> None:
    """A pick that was not the one meant says nothing about its speed.

    Raises:
        RuntimeError: it was another one.
    """
    step = pick(REQUEST, view, NOW_S)
    if step != ToProvider(name_of(1)):
        raise RuntimeError(f"meant was provider-1, the cheapest that takes a seed; picked was {step}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="after one of warm-up")
    arguments = parser.parse_args()
    houses = [backends(replicas) for replicas in REPLICAS]
    at_1000, exponents, views = [], [], []
    for number in range(arguments.rounds + 1):
        picks, news = [], []
        for house in houses:
            view = house.view(NOW_S)
            check(view)
            picks.append(microseconds(partial(pick, REQUEST, view, NOW_S), LINE))
            news.append(microseconds(partial(new_view, house), VIEWS))
        exponent = growth_exponent(REPLICAS, picks)
        shown = ", ".join(f"{replicas}: {one:.1f} µs" for replicas, one in zip(REPLICAS, picks, strict=True))
        print(f"round {number or 'warm-up'}: {shown}; ^{exponent:.3f}; a new view {news[0]:.0f} µs", flush=True)
        if number:
            at_1000.append(picks[0])
            exponents.append(exponent)
            views.append(news[0])
    publish(
        "spill_decision",
        {
            "microseconds": figure(at_1000, goal="<= 100"),
            "growth_exponent": figure(exponents, goal="<= 0.1"),
            "view_microseconds": figure(
                views, goal="<= 500", note="at 1,000 replicas in 125 pools; needed anew after each placed request"
            ),
        },
        rounds=arguments.rounds,
        packages=("tidegate",),
    )


if __name__ == "__main__":
    main()
