"""What became of the GPU-hours and the requests, of the cluster and of each run. Pure."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tidegate.arbiter.holdings import Holding
from tidegate.checkpoint.turns import young_daly_s
from tidegate.telemetry.goodput import Owner, Span, gpu_seconds, refine

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    since_s: float
    until_s: float


def window(spans: Sequence[Span], looked_until_s: float, last_s: float | None = None) -> Times:
    """What there are records of: from the first span to the newest look, or the last seconds of that.

    Raises:
        ValueError: there are no records.
    """
    if not spans or looked_until_s <= spans[0].start_s:
        raise ValueError("no GPU-seconds are on record")
    first_s = spans[0].start_s
    return Times(since_s=first_s if last_s is None else max(first_s, looked_until_s - last_s), until_s=looked_until_s)


def cluster_seconds(spans: Sequence[Span], times: Times, serving_s: float) -> dict[Owner, float]:
    """GPU-seconds by owner; `serving_s` of the replicas' were spent on pictures, by the request ledger."""
    return refine(gpu_seconds(spans, times.since_s, times.until_s), serving_s, checkpoint_s=0.0)


def run_seconds(spans: Sequence[Span], held: Iterable[Holding], times: Times, stalled_s: float) -> dict[Owner, float]:
    """GPU-seconds by owner while a run held its GPUs; for `stalled_s` of them the ranks waited for a checkpoint."""
    total = dict.fromkeys(Owner, 0.0)
    for holding in held:
        start_s, end_s = max(holding.start_s, times.since_s), min(holding.end_s, times.until_s)
        for owner, seconds in gpu_seconds(spans, start_s, end_s, holding.gpus).items():
            total[owner] += seconds
    return refine(total, serving_s=0.0, checkpoint_s=stalled_s)


def busy_times(held: Iterable[Holding], times: Times) -> tuple[Times, ...]:
    """When at least one of the holdings stood, without overlaps, within `times`."""
    found: list[Times] = []
    for holding in sorted(held, key=lambda holding: holding.start_s):
        since_s, until_s = max(holding.start_s, times.since_s), min(holding.end_s, times.until_s)
        if until_s <= since_s:
            continue
        if found and since_s <= found[-1].until_s:
            before = found.pop()
            since_s, until_s = before.since_s, max(before.until_s, until_s)
        found.append(Times(since_s=since_s, until_s=until_s))
    return tuple(found)


def account(total: Mapping[Owner, float], requests: Mapping[str, float]) -> dict[str, Any]:
    """Hours and shares by owner, what requests became, and what spill cost for each GPU-hour that training won.

    `requests` as `serve.ledger.read_totals` gives them. The shares are in percent with one decimal and add to 100.
    """
    shares = percentages(total)
    won = total.get(Owner.PRODUCTIVE, 0.0) / HOUR_S
    usd = requests.get("price_usd", 0.0)
    return {
        "gpu_hours": round(sum(total.values()) / HOUR_S, 6),
        "owners": {
            str(owner): {"gpu_hours": round(seconds / HOUR_S, 6), "percent": shares[owner]}
            for owner, seconds in total.items()
            if seconds > 0
        },
        "requests": {name: int(requests.get(name, 0)) for name in ("sent", "local", "spilled", "refused", "failed")},
        "spill": {
            "usd": round(usd, 4),
            "gpu_hours_won": round(won, 6),
            "usd_per_gpu_hour_won": round(usd / won, 4) if won > 0 else None,
        },
    }


def save_interval(stalls_s: Sequence[float], commits_s: Sequence[float], faults: int) -> dict[str, float] | None:
    """How far apart saves to disk are, and how far they should be by Young and Daly, from the median stall and the time
    between faults. None without a fault or with less than two commits: then nothing is known yet.

    `commits_s`: when each was committed, by the wall clock.
    """
    gaps = [later - earlier for earlier, later in itertools.pairwise(sorted(commits_s))]
    if not gaps or not faults:
        return None
    between_s = (max(commits_s) - min(commits_s)) / faults
    if between_s <= 0:
        return None
    save_s = statistics.median(stalls_s)
    return {
        "save_s": round(save_s, 6),
        "between_faults_s": round(between_s, 3),
        "now_s": round(statistics.median(gaps), 3),
        "best_s": round(young_daly_s(save_s, between_s), 3),
    }


def percentages(total: Mapping[Owner, float]) -> dict[Owner, float]:
    """Shares in percent with one decimal that add to exactly 100 (largest remainders are rounded up).

    All zero where there are no GPU-seconds.
    """
    whole = sum(total.values())
    if whole <= 0:
        return dict.fromkeys(total, 0.0)
    tenths = {owner: 1000 * seconds / whole for owner, seconds in total.items()}
    floors = {owner: int(share) for owner, share in tenths.items()}
    for owner in sorted(total, key=lambda owner: floors[owner] - tenths[owner])[: 1000 - sum(floors.values())]:
        floors[owner] += 1
    return {owner: floor / 10 for owner, floor in floors.items()}
