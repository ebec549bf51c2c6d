"""Replicas by load: a pure policy, then an arbiter over a fleet in memory that goes by it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from story import NODES, WITH_PROVIDER, Story, ask

from tidegate.arbiter.messages import GatewayReport, PoolLoad, ProviderSeen
from tidegate.arbiter.sizing import Load, LoadWatch, need, replicas_for
from tidegate.arbiter.states import ClaimState
from tidegate.ids import GatewayId, Generation, PoolName, ProviderName, pool_name
from tidegate.spec.policy import SizingSpec

SPEC = SizingSpec(down_after_s=10.0, to_zero_after_s=300.0)


def report(waiting: int = 0, busy: float = 0.0, ongoing: int = 0, spilled: int = 0) -> GatewayReport:
    out = ProviderSeen(name=ProviderName("p"), state="open", ongoing=spilled, slots=8, price_per_image_usd=0.0)
    return GatewayReport(
        gateway=GatewayId("g"),
        at_s=0.0,
        acked=Generation(0),
        waiting=waiting,
        local_busy_replicas=busy,
        pools=(PoolLoad(pool=PoolName("p"), replicas=1, ongoing=ongoing),),
        providers=(out,),
    )


def played(needs: list[int], spec: SizingSpec = SPEC, current: int = 0) -> list[int]:
    """Counts over time, one need a second, by an arbiter that has watched for long."""
    watch, counts = LoadWatch(keep_s=spec.to_zero_after_s), []
    for second, wish in enumerate(needs):
        watch.observe(float(second), wish)
        load = Load(
            highest=watch.highest(second, spec.down_after_s),
            highest_to_zero=watch.highest(second, spec.to_zero_after_s),
            watched_s=1e9,
        )
        current = replicas_for(load, spec, current)
        counts.append(current)
    return counts


def test_what_asks_for_a_replica() -> None:
    assert need([report()], 4, 0.7) == 0
    assert need([report(waiting=1)], 0, 0.7) == 1
    assert need([report(spilled=3)], 0, 0.7) == 3
    assert need([report(busy=2.0)], 4, 0.5) == 4
    assert need([report(ongoing=8)], 4, 1.0) == 4, "two requests at one replica keep one busy"


def test_a_load_between_two_counts_keeps_the_higher_one() -> None:
    """C020: 9.6 of 10 is 10, for any number of looks."""
    assert set(played([need([report(busy=9.6)], 10, 1.0)] * 200, current=10)) == {10}


def test_the_last_replica_has_a_delay_of_its_own() -> None:
    """C018: 4 -> 1 after about 10 s, 1 -> 0 not before 300 s."""
    counts = played([4] * 5 + [0] * 400)
    stopped = 5
    assert counts[stopped : stopped + 9] == [4] * 9
    assert counts[stopped + 11] == 1
    assert set(counts[stopped + 11 : stopped + 298]) == {1}
    assert counts[-1] == 0


def test_a_pool_without_load_begins_at_zero_and_gets_back_there() -> None:
    """C017: nothing but load brings a first replica; afterwards it is 0 again, and stays."""
    assert set(played([0] * 50)) == {0}
    counts = played([0] * 5 + [3] * 5 + [0] * 700)
    assert counts[5] == 3
    assert set(counts[-300:]) == {0}


def test_what_was_before_an_arbiter_came_back_is_unknown_and_not_idle() -> None:
    def after(watched_s: float) -> int:
        return replicas_for(Load(highest=0, highest_to_zero=0, watched_s=watched_s), SPEC, 4)

    assert [after(0.0), after(9.0), after(11.0), after(299.0), after(301.0)] == [4, 4, 1, 1, 0]


@settings(max_examples=100)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=300), st.integers(0, 6), st.integers(0, 2))
def test_it_never_lacks_and_never_swings(needs: list[int], current: int, least: int) -> None:
    spec = SizingSpec(down_after_s=10.0, to_zero_after_s=40.0, replicas_min=least)
    counts = played(needs, spec, current)
    assert all(count >= max(wish, least) for count, wish in zip(counts, needs, strict=True))
    lowered_s = [s for s in range(1, len(counts)) if counts[s] < counts[s - 1]]
    for at_s in lowered_s:
        # What goes was not needed for the whole window: no need in it was above what stays.
        window = needs[max(0, at_s - 8) : at_s + 1]
        assert max(window) <= max(counts[at_s], 1)


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(0, 9)), max_size=60), st.floats(1, 50))
def test_the_watch_finds_the_highest_of_a_window(steps: list[tuple[float, int]], window_s: float) -> None:
    watch, now_s, seen = LoadWatch(keep_s=60.0), 0.0, list[tuple[float, int]]()
    for later_s, wish in steps:
        now_s += later_s
        watch.observe(now_s, wish)
        seen.append((now_s, wish))
        inside = max((one for at_s, one in seen if at_s > now_s - window_s), default=0)
        nearly = max((one for at_s, one in seen if at_s > now_s - window_s - 1), default=0)
        assert inside <= watch.highest(now_s, window_s) <= nearly


def test_delays_that_contradict_are_refused() -> None:
    with pytest.raises(ValidationError, match="to_zero_after_s must not be shorter"):
        SizingSpec(down_after_s=60.0, to_zero_after_s=10.0)


# --- the arbiter -------------------------------------------------------------------------------------------------

SIZED = WITH_PROVIDER.model_copy(
    update={
        "serving": WITH_PROVIDER.serving.model_copy(
            update={"sizing": SizingSpec(down_after_s=4.0, to_zero_after_s=20.0, utilisation=1.0)}
        )
    }
)


@pytest.fixture
def story() -> Story:
    story = Story(policy=SIZED, gateway_says={"local_busy_replicas": 0.0})
    story.tick(150)  # 30 s
    return story


def running(story: Story) -> list[int]:
    return [story.fleet.pools[node].running for node in NODES]


def test_without_load_there_is_none_and_a_request_that_waits_brings_one(story: Story) -> None:
    assert running(story) == [0, 0, 0]
    story.gateway_says |= {"waiting": 1}
    story.tick(4)
    assert sum(running(story)) == 1
    story.gateway_says |= {"waiting": 0, "local_busy_replicas": 3.2}
    story.tick(5)
    assert sorted(running(story)) == [0, 2, 2], "4 replicas, on as few nodes as hold them"
    story.gateway_says |= {"local_busy_replicas": 0.0}
    story.tick(30)
    assert sum(running(story)) == 1
    assert any("replicas are enough for the load" in reason for reason in story.reasons("set_target"))
    story.tick(120)
    assert sum(running(story)) == 0
    moves = len(story.fleet.applied)
    story.tick(100)
    assert len(story.fleet.applied) == moves


def test_a_gateway_that_died_with_a_queue_asks_for_nothing(story: Story) -> None:
    """C015: what a silent one said last is dropped; the count is 0 and stays there."""
    dead = GatewayReport(gateway=GatewayId("dead"), at_s=story.clock.now_s(), acked=Generation(0), waiting=42)
    story.loop.report_gateway(dead)
    story.tick(10)
    assert sum(running(story)) == 6
    story.tick(150)
    assert sum(running(story)) == 0
    story.tick(100)
    assert sum(running(story)) == 0


def test_a_pool_is_held_at_zero_by_a_claim_however_many_wait(story: Story) -> None:
    claim = story.file(ask(gpus=6, at_least=6))
    story.train(claim)
    story.gateway_says |= {"waiting": 50}
    story.tick(100)
    assert running(story) == [0, 0, 0]
    assert story.claim(claim).state is ClaimState.RUNNING
    assert set(story.loop.book.orders.allowances.values()) == {0}
    assert pool_name(NODES[0]) in story.loop.book.orders.allowances


def test_the_spillway_closes_when_as_many_are_home_as_the_load_asks_for(story: Story) -> None:
    story.gateway_says |= {"local_busy_replicas": 2.0}
    story.tick(10)
    claim = story.file(ask(gpus=6, at_least=6))
    story.train(claim)
    assert story.loop.book.orders.spillway == "open"
    story.fleet.gangs_gone[claim] = "over"
    story.until(claim, ClaimState.DONE)
    story.tick(100)
    assert story.loop.book.orders.spillway == "closed"
    assert sum(running(story)) == 2


def test_an_arbiter_that_comes_back_keeps_what_it_finds(story: Story) -> None:
    story.gateway_says |= {"local_busy_replicas": 4.0}
    story.tick(10)
    story.gateway_says |= {"local_busy_replicas": 0.0}
    story.restart()
    story.tick(10)
    assert sum(running(story)) == 4
    story.gateway_says |= {"local_busy_replicas": 4.0}
    story.tick(10)
    story.silent_gateway = True
    story.tick(200)
    assert sum(running(story)) == 4, "no gateway reports: nothing is known"
