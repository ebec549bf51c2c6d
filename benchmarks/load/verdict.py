"""What a load test must show, judged from what its clients heard, the ledgers and the provider's own books. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.load.asks import Kind
from benchmarks.soak.verdict import Check

from tidegate.serve.ledger import Outcome
from tidegate.serve.ledger_reading import Audited

Row = Mapping[str, Any]

ENDS: Mapping[int, frozenset[str]] = {
    200: frozenset({Outcome.ANSWERED}),
    400: frozenset({Outcome.REFUSED}),
    429: frozenset({Outcome.REFUSED}),
    502: frozenset({Outcome.FAILED}),
    503: frozenset({Outcome.REFUSED}),
    504: frozenset({Outcome.FAILED}),
}
"""What a client heard -> how the ledger may say that its request ended."""

LOST = (504, "answer_lost")
"""What a client hears whose picture a provider took money for and then died with: it is never bought again."""


def checks(
    heard: Sequence[Row], ledger: Iterable[Audited], audit: Row, books: Row, *, asked: int, lost_max: int
) -> tuple[Check, ...]:
    """
    Args:
        heard: the clients' own lines, one an ask.
        ledger: every request and what its attempts add up to.
        audit: what `tidegate audit --json` said.
        books: the provider's own counts, summed over its lives; what it did in its last moments before SIGKILL is not
            among them.
        asked: requests that the clients sent.
        lost_max: how many requests the provider may have held when it was killed, or was told to drop.
    """
    rows = list(ledger)
    sound = [row for row in heard if row["kind"] == Kind.SOUND]
    lost = [row for row in sound if (row["status"], row["code"]) == LOST]
    bad = [row for row in sound if row["problem"] or (row["status"] != 200 and row not in lost)]
    return (
        Check(
            name="every ask came to an end",
            holds=len(heard) == asked and not any(row["problem"] for row in heard),
            detail=f"{len(heard)} of {asked}{_first([row for row in heard if row['problem']])}",
        ),
        Check(
            name="every sound request was answered, but for those that a dying provider kept",
            holds=not bad and len(lost) <= lost_max and _all_were_lost(lost, rows),
            detail=f"{len(sound) - len(bad) - len(lost)} of {len(sound)} answered, {len(lost)} lost with the provider"
            f" (at most {lost_max}){_first(bad)}",
        ),
        *_oversized(heard),
        *_ended(heard, rows),
        Check(
            name="`tidegate audit` proves it: none lost, none paid for twice",
            holds=bool(audit["proven"]) and not audit["paid_twice"] and not audit["under_way"],
            detail=f"accepted {audit['accepted']} = answered {audit['answered']} + refused {audit['refused']}"
            f" + cancelled {audit['cancelled']}; paid twice {audit['paid_twice']}, findings {audit['broken']}",
        ),
        _paid(rows, books),
    )


def _all_were_lost(lost: Sequence[Row], rows: Sequence[Audited]) -> bool:
    """Each 504 had one attempt that may have cost money, and no answer."""
    by_id = {row.request_id: row for row in rows}
    found = [by_id.get(row["request_id"]) for row in lost]
    return all(row is not None and row.paid_attempts == 1 and row.answered_attempts == 0 for row in found)


def _oversized(heard: Sequence[Row]) -> tuple[Check, Check]:
    bodies = Counter(row["status"] for row in heard if row["kind"] == Kind.BIG_BODY)
    pictures = Counter(row["status"] for row in heard if row["kind"] == Kind.BIG_PICTURE)
    return (
        Check(name="bodies over the limit: 413", holds=set(bodies) == {413}, detail=_counts(bodies)),
        Check(name="pictures over the limit: 400", holds=set(pictures) == {400}, detail=_counts(pictures)),
    )


def _ended(heard: Sequence[Row], rows: Sequence[Audited]) -> tuple[Check, Check]:
    ends: dict[str, list[str | None]] = {}
    for row in rows:
        ends.setdefault(row.request_id, []).append(row.outcome)
    told = [row for row in heard if row["request_id"]]
    wrong = [
        row
        for row in told
        if len(ends.get(row["request_id"], ())) != 1
        or ends[row["request_id"]][0] not in ENDS.get(row["status"], frozenset())
    ]
    ids = {row["request_id"] for row in told}
    # A client that left may have done so before its bytes had arrived; what has no body never becomes a request.
    left = sum(row["kind"] == Kind.CANCELLED and not row["request_id"] for row in heard)
    return (
        Check(
            name="every request ended once, and as its client heard",
            holds=not wrong and len(ids) == len(told),
            detail=f"{len(ids)} ids of {len(told)} answers, {len(wrong)} not so{_first(wrong)}",
        ),
        Check(
            name="the ledgers hold every request that was made, and no other",
            holds=len(told) <= len(rows) <= len(told) + left,
            detail=f"{len(rows)} rows; {len(told)} clients heard of theirs, {left} left before",
        ),
    )


def _paid(rows: Sequence[Audited], books: Row) -> Check:
    paid = sum(row.paid_attempts for row in rows)
    return Check(
        name="the provider's books agree: each picture made for one request, each in the ledger",
        holds=not books["bought_twice"] and books["answered"] <= paid + books["canaries"],
        detail=f"it made {books['answered']}, {books['bought_twice']} of them twice; the ledgers hold {paid} paid"
        f" attempts and {books['canaries']} canaries",
    )


def _counts(counted: Counter[int]) -> str:
    return ", ".join(f"{status}: {times}" for status, times in sorted(counted.items())) or "none"


def _first(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    row = rows[0]
    return (
        f"; first: number {row['number']}, status {row['status']} {row['code'] or ''} {row['problem'] or ''}".rstrip()
    )
