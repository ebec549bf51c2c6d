"""The load test: what it asks, what its verdict notices, and once, in short, the whole story on a cluster."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.load.__main__ import main
from benchmarks.load.asks import PATIENCE_S, SHARES, Kind, asks
from benchmarks.load.verdict import checks

from tidegate.ports import free_port
from tidegate.serve.audit import audit
from tidegate.serve.ledger_reading import Audited


def test_asks_come_from_the_seed_at_the_rate_and_in_the_shares() -> None:
    many = list(itertools.islice(asks(seed=3, rate_per_s=20.0), 20_000))
    assert many[:100] == list(itertools.islice(asks(seed=3, rate_per_s=20.0), 100))
    assert many[-1].at_s == pytest.approx(1000, rel=0.03)
    counted = Counter(ask.kind for ask in many)
    assert {kind: counted[kind] / 20_000 for kind in Kind} == pytest.approx(SHARES, abs=0.01)
    leaving = [ask.leaves_after_s for ask in many if ask.kind is Kind.CANCELLED]
    assert all(after is not None and PATIENCE_S[0] <= after <= PATIENCE_S[1] for after in leaving)
    assert all(ask.leaves_after_s is None for ask in many if ask.kind is not Kind.CANCELLED)


def heard(number: int, kind: Kind = Kind.SOUND, status: int = 200, **more: Any) -> dict[str, Any]:
    has_id = status not in (0, 413)
    row = {"number": number, "kind": kind, "status": status, "code": None, "problem": None}
    return {**row, "request_id": f"r{number}" if has_id else "", **more}


def ended(number: int, outcome: str = "answered", *, paid: int = 0, made: int = 1) -> Audited:
    return Audited(
        gateway="g",
        request_id=f"r{number}",
        accepted_at_s=1.0,
        outcome=outcome,
        reason=None if outcome in ("answered", "cancelled") else "why",
        images=made,
        attempts=made or paid,
        answered_attempts=made,
        paid_attempts=paid,
        paid_to="provider/p" * paid,
        price_usd=0.01 * paid,
    )


HEARD = [
    heard(1),
    heard(2),
    heard(3, Kind.CANCELLED, 0),
    heard(4, Kind.BIG_BODY, 413),
    heard(5, Kind.BIG_PICTURE, 400),
    heard(6, status=504, code="answer_lost"),
]
LEDGER = [
    ended(1),
    ended(2, paid=1),
    ended(3, "cancelled", made=0),
    ended(5, "refused", made=0),
    ended(6, "failed", paid=1, made=0),
]
BOOKS = {"answered": 2, "bought_twice": 0, "canaries": 0}


def wrong(
    rows: list[dict[str, Any]], ledger: list[Audited], books: dict[str, int] = BOOKS, *, asked: int = 6, lost: int = 1
) -> set[str]:
    found = audit(ledger, now_s=100.0, grace_s=0.0)
    said = {"proven": found.proven, **{name: getattr(found, name) for name in ("accepted", "answered", "refused")}}
    said |= {name: getattr(found, name) for name in ("cancelled", "under_way", "paid_twice", "broken")}
    judged = checks(rows, ledger, said, books, asked=asked, lost_max=lost)
    return {check.name.split()[1] for check in judged if not check.holds}


def test_a_load_that_held() -> None:
    assert wrong(HEARD, LEDGER) == set()
    unseen = [row for row in LEDGER if row.request_id != "r3"]  # it left before its bytes had come
    assert wrong(HEARD, unseen) == set()


@pytest.mark.parametrize(
    ("rows", "ledger", "options", "found"),
    [
        (HEARD, LEDGER, {"asked": 7}, {"ask"}),
        ([heard(1, status=0, problem="ReadError"), *HEARD[1:]], LEDGER, {}, {"ask", "sound", "ledgers"}),
        (
            [heard(1, status=503), *HEARD[1:]],
            [ended(1, "refused", made=0), *LEDGER[1:]],
            {},
            {"sound"},
        ),
        ([heard(1, status=503), *HEARD[1:]], LEDGER, {}, {"sound", "request"}),
        (HEARD, LEDGER, {"lost": 0}, {"sound"}),
        (HEARD, [*LEDGER[:-1], ended(6, "failed", made=0)], {"books": {**BOOKS, "answered": 1}}, {"sound"}),
        ([*HEARD[:3], heard(4, Kind.BIG_BODY, 200, request_id=""), *HEARD[4:]], LEDGER, {}, {"over"}),
        ([*HEARD[:4], heard(5, Kind.BIG_PICTURE, 504), HEARD[5]], LEDGER, {}, {"over", "request"}),
        (HEARD, LEDGER[1:], {}, {"request"}),
        (HEARD, LEDGER[:1], {}, {"sound", "request", "ledgers", "provider's"}),
        (HEARD, [*LEDGER, ended(7), ended(8)], {}, {"ledgers"}),
        (HEARD, [replace(LEDGER[0], paid_attempts=2), *LEDGER[1:]], {}, {"audit`"}),
        (HEARD, [replace(LEDGER[0], outcome=None), *LEDGER[1:]], {}, {"request", "audit`"}),
        (HEARD, LEDGER, {"books": {**BOOKS, "bought_twice": 1}}, {"provider's"}),
        (HEARD, LEDGER, {"books": {**BOOKS, "answered": 3}}, {"provider's"}),
    ],
)
def test_what_went_wrong_is_found(
    rows: list[dict[str, Any]], ledger: list[Audited], options: dict[str, Any], found: set[str]
) -> None:
    assert wrong(rows, ledger, **options) == found


@pytest.mark.cluster
def test_nothing_is_lost_or_paid_twice_while_gpus_and_provider_come_and_go(tmp_path: Path) -> None:
    port = free_port()
    code = main(["--seconds", "2", "--rate", "20", "--base-port", str(port), "--output", str(tmp_path)])
    assert code == 0, (tmp_path / "load.md").read_text()
    summary = json.loads((tmp_path / "load.json").read_text())
    assert summary["holds"]
    assert [phase["replicas"] for phase in summary["phases"]] == [4, 0, 0, 0, 4]
