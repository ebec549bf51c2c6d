"""Where a request goes: the rules as a table, and what holds for every view."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.arbiter.messages import OverBudget, Spillway
from tidegate.ids import PoolName, ProviderName
from tidegate.serve.hedging import hedge_at_s, second_place
from tidegate.serve.routing import (
    PoolView,
    ProviderView,
    Reject,
    RouteRequest,
    Step,
    ToLocal,
    ToProvider,
    View,
    Wait,
    _can_make,
    pick,
    wait_is_for_all,
)
from tidegate.serve.work import Size

NOW = 1000.0
NEXT_HOUR_S = NOW + 600
NO_MONEY = OverBudget(reason="the hour's spill budget is spent", until_s=NEXT_HOUR_S)
REFUSED = Reject(NO_MONEY.reason, NEXT_HOUR_S - NOW, over_budget=True)
SMALL = Size(8, 8)


def pool(
    name: str = "a", *, replicas: int = 1, free: int = 0, ongoing: int = 2, service_s: float | None = None
) -> PoolView:
    return PoolView(pool=PoolName(name), replicas=replicas, free_slots=free, ongoing=ongoing, service_s=service_s)


def provider(
    name: str = "p", *, price: float = 0.01, ongoing: int = 0, slots: int = 4, rests_s: float = 0.0, **more: object
) -> ProviderView:
    until_s = NOW + rests_s if rests_s else 0.0
    known = ProviderView(
        name=ProviderName(name),
        ongoing=ongoing,
        slots=slots,
        resting_until_s=until_s,
        price_per_image_usd=price,
        latency_s=None,
        models=frozenset({"m"}),
        sizes=None,
    )
    return replace(known, **more)  # type: ignore[arg-type]


def view(*places: PoolView | ProviderView, spillway: Spillway = Spillway.CLOSED) -> View:
    pools = tuple(place for place in places if isinstance(place, PoolView))
    providers = tuple(place for place in places if isinstance(place, ProviderView))
    return View(pools=pools, providers=providers, spillway=spillway)


def broke(*places: PoolView | ProviderView) -> View:
    """Spillway open, purse empty."""
    return replace(view(*places, spillway=Spillway.OPEN), over_budget=NO_MONEY)


def request(*, patience_s: float = 10.0, deadline_s: float = 30.0, **more: object) -> RouteRequest:
    plain = RouteRequest(
        model="m", size=SMALL, accepted_at_s=NOW, patience_until_s=NOW + patience_s, deadline_s=NOW + deadline_s
    )
    return replace(plain, **more)  # type: ignore[arg-type]


OPEN = Spillway.OPEN
TO_A, TO_P = ToLocal(PoolName("a")), ToProvider(ProviderName("p"))

TABLE: dict[str, tuple[RouteRequest, View, Step]] = {
    "a free local slot wins": (request(), view(pool(free=1), provider(), spillway=OPEN), TO_A),
    "the pool with most room": (request(), view(pool("b", free=1), pool("a", free=2)), TO_A),
    "a pool at zero is never chosen": (request(), view(pool(replicas=0, free=2)), Wait(NOW + 10)),
    "open: overflow leaves at once": (request(), view(pool(), provider(), spillway=OPEN), TO_P),
    "open: the cheapest": (request(), view(pool(), provider("q", price=1), provider(), spillway=OPEN), TO_P),
    "open: the next when that is full": (
        request(),
        view(pool(), provider("q", price=0, ongoing=4), provider(), spillway=OPEN),
        TO_P,
    ),
    "open: nothing free anywhere": (request(), view(pool(), provider(ongoing=4), spillway=OPEN), Wait(NOW + 30)),
    "closed: patience first": (request(), view(pool(), provider()), Wait(NOW + 10)),
    "closed: spills before failing": (request(patience_s=-1), view(pool(), provider()), TO_P),
    "closed: patience first, at zero too": (request(), view(pool(replicas=0), provider()), Wait(NOW + 10)),
    "closed: a hopeless queue isn't waited for": (request(), view(pool(service_s=11.0), provider()), TO_P),
    "closed: a quick queue is": (request(), view(pool(service_s=9.0), provider()), Wait(NOW + 10)),
    "closed, no pools left for it": (
        request(excluded_pools=frozenset({PoolName("a")})),
        view(pool(free=1), provider()),
        TO_P,
    ),
    "local_only never leaves": (request(local_only=True), view(pool(), provider(), spillway=OPEN), Wait(NOW + 30)),
    "C160 bought once is never bought again": (
        request(bought=True),
        view(pool(), provider(), spillway=OPEN),
        Wait(NOW + 30),
    ),
    "a size that it can't make": (
        request(),
        view(pool(), provider(sizes=frozenset({Size(16, 16)})), spillway=OPEN),
        Wait(NOW + 30),
    ),
    "a model that it doesn't have": (
        request(),
        view(pool(), provider(models=frozenset({"x"})), spillway=OPEN),
        Wait(NOW + 30),
    ),
    "C158 a provider without a word for the seed": (
        request(needs=frozenset({"seed"})),
        view(pool(), provider("p", price=9), provider("q", honours=frozenset({"steps"})), spillway=OPEN),
        TO_P,
    ),
    "more pictures than it makes at once": (
        request(images=3),
        view(pool(), provider("p", price=9, images_max=4), provider("q", images_max=2), spillway=OPEN),
        TO_P,
    ),
    "the cheapest for this size": (
        request(),
        view(pool(), provider("p", price=9, prices_usd={SMALL: 0.001}), provider("q"), spillway=OPEN),
        TO_P,
    ),
    "over budget: free in this size": (
        request(),
        broke(pool(replicas=0), provider("p", price=9, prices_usd={SMALL: 0.0})),
        TO_P,
    ),
    "one that drifted takes nothing": (
        request(),
        view(pool(), provider("p", price=9), provider("q", closed="drifted"), spillway=OPEN),
        TO_P,
    ),
    "C155 all rest, one is back in time": (
        request(),
        view(provider(rests_s=4), provider("q", rests_s=20), provider("r", rests_s=60), spillway=OPEN),
        Wait(NOW + 4),
    ),
    "C155 none is back in time": (
        request(deadline_s=3),
        view(provider(rests_s=4), provider("q", rests_s=20), spillway=OPEN),
        Reject("every provider rests beyond its deadline", 4.0),
    ),
    "none is back in time, but a pool may come home": (
        request(deadline_s=3),
        view(pool(replicas=0), provider(rests_s=4), spillway=OPEN),
        Wait(NOW + 3),
    ),
    "past its deadline": (
        request(deadline_s=0),
        view(pool(free=1), provider(rests_s=4)),
        Reject("no replica and no provider took it before its deadline", 4.0),
    ),
    "nobody there": (request(), view(), Reject("nothing here can make it", 1.0)),
    "over budget: a free local slot is free": (request(), broke(pool(free=1), provider()), TO_A),
    "over budget, open: a busy replica is waited for": (request(), broke(pool(), provider()), Wait(NOW + 10)),
    "over budget, patience is over": (request(patience_s=-1), broke(pool(), provider()), REFUSED),
    "over budget, no replica is left": (request(), broke(pool(replicas=0), provider()), REFUSED),
    "over budget: what costs nothing is used": (request(), broke(pool(replicas=0), provider(price=0)), TO_P),
    "over budget: what costs nothing is waited for": (
        request(),
        broke(pool(replicas=0), provider(price=0, rests_s=4), provider("q")),
        Wait(NOW + 4),
    ),
    "over budget: what may not leave waits as ever": (
        request(local_only=True),
        broke(pool(), provider()),
        Wait(NOW + 10),
    ),
    "over budget, closed: patience first": (
        request(),
        replace(broke(pool(replicas=0), provider()), spillway=Spillway.CLOSED),
        Wait(NOW + 10),
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_pick(case: str) -> None:
    asked, seen, step = TABLE[case]
    assert pick(asked, seen, NOW) == step


def test_those_ahead_count_for_the_expected_wait() -> None:
    """Two replicas of 4 s work off 0.5 requests a second: the fifth in line would wait 10 s, the sixth longer."""
    seen = view(pool(replicas=2, service_s=4.0), provider())
    assert pick(request(), seen, NOW, ahead=4) == Wait(NOW + 10)
    assert pick(request(), seen, NOW, ahead=5) == TO_P


pools_st = st.lists(
    st.builds(
        PoolView,
        pool=st.sampled_from(["a", "b", "c"]).map(PoolName),
        replicas=st.integers(0, 3),
        free_slots=st.integers(0, 6),
        ongoing=st.integers(0, 6),
        service_s=st.none() | st.floats(0.01, 20),
    ),
    max_size=3,
    unique_by=lambda p: p.pool,
)
providers_st = st.lists(
    st.builds(
        ProviderView,
        name=st.sampled_from(["p", "q", "r"]).map(ProviderName),
        ongoing=st.integers(0, 5),
        slots=st.integers(1, 4),
        resting_until_s=st.sampled_from([0.0]) | st.floats(NOW - 60, NOW + 60),
        price_per_image_usd=st.floats(0, 1),
        latency_s=st.none() | st.floats(0, 5),
        models=st.sampled_from([frozenset({"m"}), frozenset({"x"}), frozenset({"m", "x"})]),
        sizes=st.sampled_from([None, frozenset({SMALL}), frozenset({Size(16, 16)})]),
        honours=st.none() | st.frozensets(st.sampled_from(["size", "seed", "seeds", "steps"])),
        images_max=st.none() | st.integers(1, 4),
        prices_usd=st.dictionaries(st.just(SMALL), st.sampled_from([0.0, 0.5]), max_size=1),
        closed=st.none() | st.just("drifted"),
    ),
    max_size=3,
    unique_by=lambda p: p.name,
)
views_st = st.builds(
    View,
    pools=pools_st.map(tuple),
    providers=providers_st.map(tuple),
    spillway=st.sampled_from(Spillway),
    over_budget=st.none() | st.just(NO_MONEY),
)
requests_st = st.builds(
    RouteRequest,
    model=st.just("m"),
    size=st.just(SMALL),
    accepted_at_s=st.just(NOW - 5),
    patience_until_s=st.floats(NOW - 5, NOW + 20),
    deadline_s=st.floats(NOW - 1, NOW + 60),
    local_only=st.booleans(),
    bought=st.booleans(),
    excluded_pools=st.frozensets(st.sampled_from(["a", "b", "c"]).map(PoolName), max_size=2),
    excluded_providers=st.frozensets(st.sampled_from(["p", "q", "r"]).map(ProviderName), max_size=2),
    needs=st.frozensets(st.sampled_from(["size", "seed", "seeds", "steps"])),
    images=st.integers(1, 5),
    hedge_after_s=st.none() | st.floats(0.1, 10),
)


@given(requests_st, views_st, st.integers(0, 20))
def test_every_step_is_allowed(asked: RouteRequest, seen: View, ahead: int) -> None:
    step = pick(asked, seen, NOW, ahead)
    match step:
        case ToLocal(name):
            chosen = next(p for p in seen.pools if p.pool == name)
            assert chosen.replicas > 0
            assert chosen.free_slots > 0
            assert name not in asked.excluded_pools
        case ToProvider(name):
            taken = next(p for p in seen.providers if p.name == name)
            assert not asked.local_only
            assert not asked.bought
            assert name not in asked.excluded_providers
            assert taken.ongoing < taken.slots
            assert taken.resting_until_s <= NOW
            assert "m" in taken.models
            assert taken.sizes is None or SMALL in taken.sizes
            assert seen.over_budget is None or taken.price_usd(SMALL) == 0
            assert taken.honours is None or asked.needs <= taken.honours
            assert taken.images_max is None or asked.images <= taken.images_max
            assert taken.closed is None
            assert not any(p.replicas and p.free_slots and p.pool not in asked.excluded_pools for p in seen.pools)
        case Wait(until_s):
            assert NOW < until_s <= asked.deadline_s
        case Reject(_, retry_after_s, over_budget):
            assert retry_after_s >= 1
            assert not over_budget or seen.over_budget is not None


@given(requests_st, views_st)
def test_spills_before_it_fails(asked: RouteRequest, seen: View) -> None:
    """Once patience is over and a capable provider stands ready, a request neither waits nor fails."""
    late = replace(asked, patience_until_s=NOW, deadline_s=NOW + 1, local_only=False, bought=False)
    ready = replace(provider("ready", price=9.0), resting_until_s=0.0)
    step = pick(late, replace(seen, providers=(*seen.providers, ready), over_budget=None), NOW)
    assert isinstance(step, ToLocal | ToProvider)


@given(requests_st, views_st)
def test_what_a_request_does_not_ask_for_keeps_nobody_out(asked: RouteRequest, seen: View) -> None:
    """Asking for less never turns a way that was open into a refusal."""
    plain = replace(asked, needs=frozenset(), images=1)
    if isinstance(pick(asked, seen, NOW), ToProvider):
        assert isinstance(pick(plain, seen, NOW), ToProvider)


@given(requests_st, views_st)
def test_waiting_ends(asked: RouteRequest, seen: View) -> None:
    """Following each `Wait` to its time, with nothing else changing, ends in finitely many steps."""
    now_s = NOW
    for _ in range(10):
        step = pick(asked, seen, now_s)
        if not isinstance(step, Wait):
            return
        assert step.until_s > now_s
        now_s = step.until_s
    pytest.fail("still waiting")


@given(requests_st, views_st)
def test_a_full_house_is_full_for_all(asked: RouteRequest, seen: View) -> None:
    if wait_is_for_all(seen, NOW):
        assert isinstance(pick(asked, seen, NOW), Wait | Reject)


@given(requests_st, views_st, st.integers(0, 5))
def test_a_second_place_is_another_one_and_only_for_who_may_be_made_twice(
    asked: RouteRequest, seen: View, which: int
) -> None:
    places = [*(ToLocal(p.pool) for p in seen.pools), *(ToProvider(p.name) for p in seen.providers)]
    if not places:
        return
    first = places[which % len(places)]
    second = second_place(asked, first, seen, NOW)
    if asked.hedge_after_s is None or asked.deadline_s <= NOW:
        assert second is None
    if second is not None:
        assert second != first
        assert asked.may_leave or isinstance(second, ToLocal)
        assert pick(replace(asked, patience_until_s=NOW), seen, NOW) is not None


@given(requests_st, st.floats(NOW - 5, NOW + 30))
def test_a_hedge_comes_after_its_time_and_before_the_deadline(asked: RouteRequest, started_at_s: float) -> None:
    at_s = hedge_at_s(asked, started_at_s)
    if at_s is not None:
        assert asked.hedge_after_s is not None
        assert started_at_s < at_s < asked.deadline_s


@given(requests_st, views_st, st.integers(0, 20))
def test_nothing_is_started_where_replicas_are_to_leave(asked: RouteRequest, seen: View, ahead: int) -> None:
    """C010: gateways hear of a drain by the allowance 0 before it begins; from then on nothing begins there, however
    short: so what is under way has the whole of the drain's time."""
    drained = replace(seen, pools=tuple(replace(pool, replicas=0) for pool in seen.pools))
    assert not isinstance(pick(asked, drained, NOW, ahead), ToLocal)


@given(requests_st, views_st)
def test_resting_providers_are_waited_for_while_one_returns_in_time(asked: RouteRequest, seen: View) -> None:
    """All of them cooling down is no instant error."""
    rests = NOW + 1.0
    providers = tuple(replace(one, resting_until_s=rests, ongoing=0) for one in seen.providers)
    view = replace(seen, pools=(), providers=providers, over_budget=None)
    step = pick(asked, view, NOW)
    able = [one for one in providers if _can_make(one, asked)]
    if able and asked.deadline_s > rests and asked.deadline_s > NOW:
        assert step == Wait(rests)
        assert isinstance(pick(asked, view, rests), ToProvider)
