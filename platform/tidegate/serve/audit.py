"""Did every request end exactly once, and was no picture paid for twice? From the ledgers' rows alone. Pure.

    accepted = answered + refused + cancelled (+ under way, + lost with a gateway that was killed)

A refusal that came after something was tried (502, 504) is a refusal too, and counted apart as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from tidegate.serve.ledger import Outcome
from tidegate.serve.ledger_reading import Audited

LISTED_MAX = 1000
"""Findings that are kept with their words; all are counted."""

ENDS = {
    Outcome.ANSWERED: "answered",
    Outcome.REFUSED: "refused",
    Outcome.CANCELLED: "cancelled",
    Outcome.FAILED: "refused",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One request that breaks the sum, or was paid for twice."""

    request: str
    gateway: str
    what: str


@dataclass(slots=True)
class Audit:
    accepted: int = 0
    answered: int = 0
    refused: int = 0
    refused_after_attempts: int = 0
    """Of the refused."""
    cancelled: int = 0
    lost: int = 0
    """Their gateway was killed with them under way. Each is a finding: a client got no answer."""
    under_way: int = 0
    """Accepted within the last `grace_s`, not ended yet."""
    paid_twice: int = 0
    hedged: int = 0
    """Asked for at two places at once, as their callers allow."""
    spent_usd: float = 0.0
    broken: int = 0
    """Findings in all."""
    findings: list[Finding] = field(default_factory=list)

    @property
    def proven(self) -> bool:
        ended = self.answered + self.refused + self.cancelled + self.lost + self.under_way
        return self.accepted == ended and not self.broken

    def add(self, row: Audited, what: str) -> None:
        self.broken += 1
        if len(self.findings) < LISTED_MAX:
            self.findings.append(Finding(row.request_id, row.gateway, what))


def audit(rows: Iterable[Audited], now_s: float, grace_s: float) -> Audit:
    """`rows`: every request with what its attempts add up to. `grace_s`: a request may be open for so long."""
    found = Audit()
    seen: Counter[str] = Counter()
    for row in rows:
        seen[row.request_id] += 1
        found.spent_usd += row.price_usd
        found.hedged += row.hedges > 0
        if row.paid_attempts > 1 + row.hedges:
            found.paid_twice += 1
            found.add(row, f"paid for {row.paid_attempts} times: {row.paid_to}")
        if row.accepted_at_s is None:
            found.add(row, f"{row.attempts} attempts of a request that was never accepted")
            continue
        found.accepted += 1
        if seen[row.request_id] > 1:
            found.add(row, "accepted more than once")
        _count_end(found, row, now_s, grace_s)
    return found


def _count_end(found: Audit, row: Audited, now_s: float, grace_s: float) -> None:
    if row.outcome is None:
        age_s = now_s - (row.accepted_at_s or 0.0)
        if age_s <= grace_s:
            found.under_way += 1
        else:
            found.add(row, f"never ended: accepted {age_s:.0f} s ago, and nothing since")
        return
    if row.outcome == Outcome.LOST:
        found.lost += 1
        found.add(row, row.reason or "lost by its gateway")
        return
    try:
        end = ENDS[Outcome(row.outcome)]
    except ValueError:
        found.add(row, f"ended as {row.outcome!r}, which is no way to end")
        return
    setattr(found, end, getattr(found, end) + 1)
    found.refused_after_attempts += row.outcome == Outcome.FAILED
    if row.outcome == Outcome.ANSWERED and not 1 <= row.answered_attempts <= 1 + row.hedges:
        found.add(row, f"answered, with {row.answered_attempts} attempts that made its pictures")
    elif row.outcome == Outcome.ANSWERED and row.images < 1:
        found.add(row, "answered without a picture")
    elif row.outcome != Outcome.ANSWERED and not row.reason and row.outcome != Outcome.CANCELLED:
        found.add(row, f"{row.outcome} without a reason")
