"""Money for spill: counted once whatever restarts, forecast from what is measured, and what happens without any."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from story import WITH_PROVIDER, Story, ask

from tidegate.arbiter.journal import FileJournal
from tidegate.arbiter.loop import ArbiterLoop
from tidegate.arbiter.messages import GatewayReport, OverBudget, ProviderSeen
from tidegate.arbiter.moves import Spend
from tidegate.arbiter.purse import Purse, cost_per_hour_usd, count, over_budget, spent, totals_to_count
from tidegate.arbiter.states import ClaimState
from tidegate.arbiter.status import status_of
from tidegate.ids import GatewayId, Generation, ProviderName
from tidegate.spec.policy import PurseSpec
from tidegate.telemetry.goodput import SpanBook

HOUR_S = 3600.0
NOON = 500 * 86_400.0 + 12 * HOUR_S


def gateway(name: str = "g", usd: float = 0.0, **more: object) -> GatewayReport:
    plain = GatewayReport(gateway=GatewayId(name), at_s=NOON, acked=Generation(1), spent_usd_total=usd)
    return replace(plain, **more)  # type: ignore[arg-type]


def provider(price: float, state: str = "open", name: str = "p") -> ProviderSeen:
    return ProviderSeen(name=ProviderName(name), state=state, ongoing=0, slots=4, price_per_image_usd=price)


def by_name(*reports: GatewayReport) -> dict[GatewayId, GatewayReport]:
    return {report.gateway: report for report in reports}


# --- counting ---------------------------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "b"]), st.floats(0, 5), st.sampled_from(["pay", "look", "gateway restarts"])),
        max_size=60,
    )
)
def test_every_cent_is_counted_once(events: list[tuple[str, float, str]]) -> None:
    """Whatever the order of payments, looks and gateway restarts (which may lose the newest ledger rows)."""
    purse, now_s = Purse(), NOON
    totals = {"a": 0.0, "b": 0.0}
    paid = 0.0
    for name, usd, event in events:
        now_s += 1.0
        match event:
            case "pay":
                totals[name] += usd
                paid += usd
            case "gateway restarts":
                # It saw to it that the arbiter heard of all; its file lost a part.
                seen = by_name(*(gateway(n, t) for n, t in totals.items()))
                new = totals_to_count(purse, seen, PurseSpec(per_hour_usd=1e-9), now_s)
                purse = count(purse, new, now_s) if new else purse
                totals[name] = max(0.0, totals[name] - usd)
            case _:
                pass
        seen = by_name(*(gateway(n, t) for n, t in totals.items()))
        new = totals_to_count(purse, seen, PurseSpec(), now_s)
        if new:
            purse = count(purse, new, now_s)
        assert spent(purse, seen, now_s).hour_usd == pytest.approx(paid)


def test_hours_and_days_turn() -> None:
    purse = count(Purse(), {GatewayId("g"): 2.0}, NOON)
    purse = count(purse, {GatewayId("g"): 5.0}, NOON + HOUR_S)
    reports = by_name(gateway(usd=5.5))
    assert spent(purse, reports, NOON + HOUR_S) == spent(purse, reports, NOON + 1.9 * HOUR_S)
    now = spent(purse, reports, NOON + HOUR_S)
    assert (now.hour_usd, now.day_usd) == (3.5, 5.5)
    later = spent(purse, reports, NOON + 13 * HOUR_S)
    assert (later.hour_usd, later.day_usd) == (0.5, 0.5), "yesterday's money is not today's"
    for hour in range(1, 200):
        purse = count(purse, {GatewayId("g"): 5.0 + hour}, NOON + hour * HOUR_S)
    assert len(purse.hours_usd) <= 48


def test_money_is_written_down_now_and_then() -> None:
    purse = count(Purse(), {GatewayId("g"): 1.0}, NOON)
    budget = PurseSpec(per_hour_usd=10.0, per_day_usd=100.0)
    assert totals_to_count(purse, by_name(gateway(usd=1.4)), budget, NOON + 59) == {}
    assert totals_to_count(purse, by_name(gateway(usd=1.4)), budget, NOON + 60) == {"g": 1.4}
    assert totals_to_count(purse, by_name(gateway(usd=1.5)), budget, NOON + 1) == {"g": 1.5}, "5 % of the hour's budget"
    assert totals_to_count(purse, by_name(gateway(usd=1.5)), PurseSpec(), NOON + 1) == {}
    assert totals_to_count(purse, by_name(gateway(usd=1.0)), budget, NOON + 9999) == {}, "nothing new, nothing written"


def test_the_budget_that_lasts_longer_is_named() -> None:
    both = PurseSpec(per_hour_usd=1.0, per_day_usd=4.0)
    purse = count(Purse(), {GatewayId("g"): 1.0}, NOON)
    hour = over_budget(spent(purse, {}, NOON), both, NOON + 60)
    assert hour == OverBudget(
        reason="the hour's spill budget of $1.00 is spent, until 1971-05-16 13:00 UTC", until_s=NOON + HOUR_S
    )
    assert over_budget(spent(purse, {}, NOON), PurseSpec(per_hour_usd=1.01), NOON) is None
    assert over_budget(spent(purse, {}, NOON), PurseSpec(), NOON) is None
    purse = count(purse, {GatewayId("g"): 4.0}, NOON)
    day = over_budget(spent(purse, {}, NOON), both, NOON + 60)
    assert day is not None
    assert day.until_s == NOON + 12 * HOUR_S
    assert "day's" in day.reason
    assert over_budget(spent(Purse(), {}, NOON), PurseSpec(per_hour_usd=0), NOON) is not None, "0 = nothing is bought"


# --- the forecast -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("running", "leaving", "usd"),
    [
        (6, 6, 0.5 * 0.01 * 3600),
        (6, 0, 0.0),
        (6, 3, 0.0),  # three replicas are busy, and three stay
        (6, 4, 0.5 / 3 * 0.01 * 3600),
        (6, 5, 0.5 * 2 / 3 * 0.01 * 3600),
    ],
)
def test_what_those_that_stay_cannot_make_is_bought(running: int, leaving: int, usd: float) -> None:
    two = [
        gateway("a", local_images_per_s=0.3, local_busy_replicas=2.0, providers=(provider(0.02), provider(0.01))),
        gateway("b", local_images_per_s=0.2, local_busy_replicas=1.0, providers=(provider(0.001, "suspect"),)),
    ]
    assert cost_per_hour_usd(two, running, leaving) == pytest.approx(usd)


def test_no_provider_no_price() -> None:
    busy = gateway(local_images_per_s=1.0, local_busy_replicas=1.0, providers=(provider(0.01, "suspect"),))
    assert cost_per_hour_usd([busy], 2, 2) is None
    assert cost_per_hour_usd([gateway()], 2, 2) == 0.0, "nothing overflows"


def measured(story: Story) -> None:
    story.gateway_says = {
        "local_images_per_s": 2.0,
        "local_busy_replicas": 4.0,
        "providers": (provider(0.01, name="out"),),
    }
    story.tick(10)


def test_a_claims_answer_says_what_its_overflow_will_cost() -> None:
    story = Story()
    measured(story)
    assert story.loop.forecast(ask()).spill_usd_per_hour == pytest.approx(2 * 0.01 * 3600)
    assert story.loop.forecast(ask(gpus=2, at_least=2)).spill_usd_per_hour == 0.0, "four replicas make all of it"
    claim = story.file(ask())
    assert story.claim(claim).spill_usd_per_hour == pytest.approx(72.0)
    assert story.reasons("file") == ["test asks for 3 to 6 GPUs; its overflow will cost $72.00 an hour"]
    row = status_of(story.loop.book, story.loop.view(), story.policy, "", story.clock.now_s())["claims"][0]
    assert row["spill_usd_per_hour"] == pytest.approx(72.0)
    story.gateway_says["providers"] = (provider(0.01, "suspect"),)
    story.tick()
    assert story.loop.forecast(ask("other")).spill_usd_per_hour is None


# --- over budget ------------------------------------------------------------------------------------------------


def with_purse(**settings: object) -> Story:
    story = Story(policy=WITH_PROVIDER.model_copy(update={"purse": PurseSpec(**settings)}))  # type: ignore[arg-type]
    story.tick(10)
    return story


def status(story: Story) -> dict[str, object]:
    found = status_of(story.loop.book, story.loop.view(), story.policy, "", story.clock.now_s())
    purse: dict[str, object] = found["purse"]
    return purse


def test_wait_a_claim_that_needs_servings_gpus_waits_for_the_next_hour() -> None:
    story = with_purse(per_hour_usd=1.0)
    story.gateway_says["spent_usd_total"] = 1.25
    story.tick()
    claim = story.file(ask())
    story.tick(20)
    assert story.claim(claim).state is ClaimState.QUEUED
    assert story.claim(claim).reason.startswith(
        "it needs serving's GPUs, and the hour's spill budget of $1.00 is spent"
    )
    assert status(story) == {
        "spent_hour_usd": 1.25,
        "spent_day_usd": 1.25,
        "per_hour_usd": 1.0,
        "per_day_usd": None,
        "over_budget": "the hour's spill budget of $1.00 is spent, until 1970-01-12 14:00 UTC",
        "then": "wait",
    }
    assert sum("spill budget" in entry.reason for entry in story.journal.entries) == 1, "it is said once"
    assert story.loop.book.orders.over_budget is None, "what overflows anyway is still paid"
    story.clock.advance(HOUR_S)
    story.until(claim, ClaimState.GRANTED)


def test_wait_a_claim_that_needs_no_replica_to_leave_goes_on() -> None:
    story = with_purse(per_hour_usd=0.0)
    for pool in story.fleet.pools.values():
        pool.target = pool.running = 0
    story.fleet.pools.clear()  # no application is deployed: all nodes are empty
    claim = story.file(ask())
    story.until(claim, ClaimState.GRANTED)


def test_shed_claims_go_on_and_gateways_refuse_what_they_would_buy() -> None:
    story = with_purse(per_hour_usd=1.0, over_budget="shed")
    assert story.loop.book.orders.over_budget is None
    before = story.loop.book.orders.generation
    story.gateway_says["spent_usd_total"] = 1.0
    story.tick(3)
    over = story.loop.book.orders.over_budget
    assert over is not None
    assert "hour's spill budget of $1.00" in over.reason
    assert story.loop.book.orders.generation > before
    claim = story.file(ask())
    story.until(claim, ClaimState.GRANTED)
    assert story.loop.book.orders.over_budget == over, "new routes keep it"
    story.restart()
    story.tick(3)
    assert story.loop.book.orders.over_budget == over
    assert len(story.reasons("shed")) == 1
    story.clock.advance(HOUR_S)
    story.tick(3)
    assert story.loop.book.orders.over_budget is None
    assert story.reasons("shed")[-1] == "overflow is bought again"


def test_a_restart_counts_nothing_twice_and_the_journal_gets_no_line_a_request(tmp_path: Path) -> None:
    story = Story()
    journal = FileJournal(tmp_path / "journal.jsonl")
    story.loop = ArbiterLoop(story.fleet, story.clock, journal, story.policy, SpanBook())
    for cents in range(1, 301):  # one payment in each tick, over a minute
        story.gateway_says["spent_usd_total"] = cents / 100
        story.tick()
    moves = [entry for entry in journal.about("purse") if entry.kind == "spend"]
    assert 1 <= len(moves) <= 3
    for _ in range(2):
        story.loop = ArbiterLoop(
            story.fleet, story.clock, FileJournal(tmp_path / "journal.jsonl"), story.policy, SpanBook()
        )
        story.tick()
        assert status(story)["spent_hour_usd"] == pytest.approx(3.0)


def test_a_late_report_takes_nothing_back() -> None:
    story = with_purse()
    story.gateway_says["spent_usd_total"] = 2.0
    story.tick()
    now = story.loop.gateways[GatewayId("g1")]
    story.loop.report_gateway(replace(now, at_s=now.at_s - 0.1, spent_usd_total=1.0))
    story.loop.tick()
    assert status(story)["spent_hour_usd"] == pytest.approx(2.0)
    assert not any(isinstance(move, Spend) and min(move.totals_usd.values()) < 2.0 for move in story.journal.moves)
