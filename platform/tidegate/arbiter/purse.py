"""Money for spill: what was spent, what a claim will cost, and whether more may be spent. Pure.

Gateways report their ledgers' totals. The book remembers how much of each total is counted, so that no restart, the
arbiter's or a gateway's, counts a cent twice; what has come since is added to what the book says.
Hours and days are clock hours and calendar days in UTC.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from tidegate.arbiter.messages import GatewayReport, OverBudget
from tidegate.ids import GatewayId
from tidegate.spec.policy import PurseSpec

HOUR_S = 3600.0
DAY_S = 86_400.0
KEPT_HOURS = 48
"""Today's and yesterday's are always among them."""

COUNT_EVERY_S = 60.0
"""Between two entries in the journal while money is spent."""
NOTABLE_SHARE = 0.05
"""Of the smaller budget: this much not yet counted is written down at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Purse:
    """The part of the book that counts money."""

    counted_usd: Mapping[GatewayId, float] = field(default_factory=dict)
    """How much of each gateway's total is in `hours`."""
    hours_usd: Mapping[int, float] = field(default_factory=dict)
    """Hour since the epoch -> spent in it."""
    counted_at_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    hour_usd: float
    day_usd: float


def uncounted(purse: Purse, gateways: Mapping[GatewayId, GatewayReport]) -> dict[GatewayId, float]:
    """What each gateway has spent beyond what is counted; gateways that spent nothing are not named.

    A total that went down (a killed gateway lost its ledger's last half second) adds nothing, and `totals_to_count` has
    it counted on from where it stands: what the ledger lost was paid all the same.
    """
    return {
        name: report.spent_usd_total - purse.counted_usd.get(name, 0.0)
        for name, report in gateways.items()
        if report.spent_usd_total > purse.counted_usd.get(name, 0.0)
    }


def totals_to_count(
    purse: Purse, gateways: Mapping[GatewayId, GatewayReport], spec: PurseSpec, now_s: float
) -> dict[GatewayId, float]:
    """The gateways' new totals where it is time to write them down, else nothing."""
    fallen = {
        name: report.spent_usd_total
        for name, report in gateways.items()
        if report.spent_usd_total < purse.counted_usd.get(name, 0.0)
    }
    news = uncounted(purse, gateways)
    budgets = [budget for budget in (spec.per_hour_usd, spec.per_day_usd) if budget is not None]
    notable = bool(budgets) and sum(news.values()) >= NOTABLE_SHARE * min(budgets)
    if not fallen and not (news and (notable or now_s - purse.counted_at_s >= COUNT_EVERY_S)):
        return {}
    return fallen | {name: gateways[name].spent_usd_total for name in news}


def count(purse: Purse, totals_usd: Mapping[GatewayId, float], at_s: float) -> Purse:
    """The purse after these totals are counted; what is new in them was spent in the hour of `at_s`."""
    new_usd = sum(max(0.0, total - purse.counted_usd.get(name, 0.0)) for name, total in totals_usd.items())
    hour = int(at_s // HOUR_S)
    kept = {old: usd for old, usd in purse.hours_usd.items() if old > hour - KEPT_HOURS}
    return Purse(
        counted_usd={**purse.counted_usd, **totals_usd},
        hours_usd={**kept, hour: kept.get(hour, 0.0) + new_usd},
        counted_at_s=at_s,
    )


def spent(purse: Purse, gateways: Mapping[GatewayId, GatewayReport], now_s: float) -> Spent:
    """Dollars spent in this hour and this day, with what is not counted yet."""
    now_usd = sum(uncounted(purse, gateways).values())
    hour, today = int(now_s // HOUR_S), int(now_s // DAY_S)
    return Spent(
        hour_usd=purse.hours_usd.get(hour, 0.0) + now_usd,
        day_usd=sum(usd for at, usd in purse.hours_usd.items() if at * HOUR_S // DAY_S == today) + now_usd,
    )


def over_budget(spent: Spent, spec: PurseSpec, now_s: float) -> OverBudget | None:
    """Which budget is spent and until when, if one is; the day's goes first, as it lasts longer.

    The sentence stays the same for as long as it holds, so that it is written down once.
    """
    for name, budget, used, length_s in (
        ("day", spec.per_day_usd, spent.day_usd, DAY_S),
        ("hour", spec.per_hour_usd, spent.hour_usd, HOUR_S),
    ):
        if budget is not None and used >= budget:
            until_s = (now_s // length_s + 1) * length_s
            ends = datetime.fromtimestamp(until_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
            reason = f"the {name}'s spill budget of ${budget:.2f} is spent, until {ends}"
            return OverBudget(reason=reason, until_s=until_s)
    return None


def cost_per_hour_usd(gateways: Iterable[GatewayReport], running: int, leaving: int) -> float | None:
    """What overflow is expected to cost in an hour when `leaving` of `running` replicas are gone.

    Those that stay work off as much as they can; the rest of the images that replicas make now goes to the cheapest
    provider that works. None = something would overflow and no provider works.
    """
    reports = list(gateways)
    images_per_s = sum(report.local_images_per_s for report in reports)
    busy = sum(report.local_busy_replicas for report in reports)
    overflows = max(0.0, 1.0 - max(0, running - leaving) / busy) if busy > 0 else 0.0
    if images_per_s * overflows == 0.0:
        return 0.0
    prices = [seen.price_per_image_usd for report in reports for seen in report.providers if seen.state != "suspect"]
    return images_per_s * overflows * min(prices) * HOUR_S if prices else None
