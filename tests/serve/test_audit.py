"""`tidegate audit`: what the ledgers prove, and each way in which they can fail to."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from tidegate.cli.audit import read_audit, since_of
from tidegate.cli.main import app
from tidegate.errors import ConfigError
from tidegate.ids import GatewayId, RequestId
from tidegate.serve.audit import Audit, audit
from tidegate.serve.ledger import Attempt, AttemptOutcome, Ledger, Outcome
from tidegate.serve.ledger_reading import Audited, read_audited, read_rows
from waiting import wait_until

NOW = 10_000.0


@contextmanager
def ledger(state_dir: Path, gateway: str = "one", rotate_bytes: int = 2**40) -> Iterator[Ledger]:
    book = Ledger(state_dir / "ledger", GatewayId(gateway), rotate_bytes=rotate_bytes)
    try:
        yield book
    finally:
        book.close()


def tried(book: Ledger, name: str, number: int, backend: str, outcome: AttemptOutcome, usd: float = 0.0) -> None:
    book.attempt(
        Attempt(
            request=RequestId(name),
            attempt=number,
            backend=backend,
            started_at_s=1.0,
            ended_at_s=2.0,
            outcome=outcome,
            price_usd=usd,
        )
    )


def sound(book: Ledger) -> None:
    """Every way to end, none of them wrong."""
    for name in "abcde":
        book.accept(RequestId(name), 100.0)
    tried(book, "a", 1, "provider/p", AttemptOutcome.REFUSED)
    tried(book, "a", 2, "provider/q", AttemptOutcome.ANSWERED, 0.04)
    book.end(RequestId("a"), 101.0, Outcome.ANSWERED, backend="provider/q", images=1)
    tried(book, "b", 1, "provider/p", AttemptOutcome.LOST, 0.04)
    tried(book, "b", 2, "local/a", AttemptOutcome.ANSWERED)
    book.end(RequestId("b"), 101.0, Outcome.ANSWERED, backend="local/a", images=1)
    book.end(RequestId("c"), 101.0, Outcome.REFUSED, reason="'n': must be 1 to 10")
    book.end(RequestId("d"), 101.0, Outcome.CANCELLED)
    tried(book, "e", 1, "provider/p", AttemptOutcome.LOST, 0.04)
    book.end(RequestId("e"), 101.0, Outcome.FAILED, reason="answer lost")
    book.accept(RequestId("f"), NOW - 1)
    tried(book, "canary-x-p", 1, "provider/p", AttemptOutcome.ANSWERED, 0.04)


def checked(state_dir: Path, since_s: float = 0.0) -> Audit:
    return read_audit(state_dir, since_s, NOW, 120.0)


def test_a_sound_ledger_is_proven(tmp_path: Path) -> None:
    with ledger(tmp_path) as book:
        sound(book)
    found = checked(tmp_path)
    counts = (found.accepted, found.answered, found.refused, found.cancelled, found.under_way)
    assert counts == (6, 2, 2, 1, 1)
    assert (found.refused_after_attempts, found.paid_twice, found.findings, found.proven) == (1, 0, [], True)
    assert found.spent_usd == pytest.approx(0.12)
    assert checked(tmp_path, NOW - 60).accepted == 1


def one_wrong(state_dir: Path) -> str:
    found = checked(state_dir)
    assert not found.proven
    (finding,) = found.findings
    return finding.what


def test_a_request_that_never_ended(tmp_path: Path) -> None:
    with ledger(tmp_path) as book:
        sound(book)
        book.accept(RequestId("lost"), 100.0)
    assert "never ended: accepted 9900 s ago" in one_wrong(tmp_path)


def test_a_picture_paid_for_twice(tmp_path: Path) -> None:
    """C160: even where both cost nothing by the price table; an answer that was lost counts as paid."""
    with ledger(tmp_path) as book:
        sound(book)
        book.accept(RequestId("twice"), 100.0)
        tried(book, "twice", 1, "provider/p", AttemptOutcome.LOST)
        tried(book, "twice", 2, "provider/q", AttemptOutcome.ANSWERED)
        book.end(RequestId("twice"), 101.0, Outcome.ANSWERED, backend="provider/q", images=1)
    assert one_wrong(tmp_path) == "paid for 2 times: provider/p,provider/q"
    assert checked(tmp_path).paid_twice == 1


def test_an_answer_that_nobody_made(tmp_path: Path) -> None:
    with ledger(tmp_path) as book:
        book.accept(RequestId("r"), 100.0)
        book.end(RequestId("r"), 101.0, Outcome.ANSWERED, backend="local/a", images=1)
    assert one_wrong(tmp_path) == "answered, with 0 attempts that made its pictures"


def test_attempts_of_nobody(tmp_path: Path) -> None:
    with ledger(tmp_path) as book:
        tried(book, "stray", 1, "provider/p", AttemptOutcome.ANSWERED, 0.04)
    assert one_wrong(tmp_path) == "1 attempts of a request that was never accepted"


def test_one_request_at_two_gateways(tmp_path: Path) -> None:
    for gateway in ("one", "two"):
        with ledger(tmp_path, gateway) as book:
            book.accept(RequestId("r"), 100.0)
            book.end(RequestId("r"), 101.0, Outcome.CANCELLED)
    assert one_wrong(tmp_path) == "accepted more than once"


def test_an_end_that_is_none(tmp_path: Path) -> None:
    with ledger(tmp_path) as book:
        book.accept(RequestId("r"), 100.0)
        book.end(RequestId("r"), 101.0, Outcome.REFUSED)
    assert one_wrong(tmp_path) == "refused without a reason"
    with closing(sqlite3.connect(tmp_path / "ledger" / "one.sqlite")) as db, db:
        db.execute("UPDATE requests SET outcome = 'gone'")
    assert "ended as 'gone'" in one_wrong(tmp_path)


rows_st = st.builds(
    Audited,
    gateway=st.just("g"),
    request_id=st.uuids().map(str),
    accepted_at_s=st.floats(0, NOW),
    outcome=st.sampled_from([None, *(str(outcome) for outcome in Outcome)]),
    reason=st.just("why"),
    images=st.integers(0, 2),
    attempts=st.just(2),
    answered_attempts=st.integers(0, 2),
    paid_attempts=st.integers(0, 2),
    paid_to=st.just("provider/p"),
    price_usd=st.just(0.1),
)


@given(st.lists(rows_st, max_size=12))
def test_proven_means_that_the_sum_holds_and_nothing_was_paid_twice(rows: list[Audited]) -> None:
    found = audit(rows, NOW, 120.0)
    ends = found.answered + found.refused + found.cancelled + found.under_way + found.lost
    lost = sum(row.outcome is None and NOW - (row.accepted_at_s or 0) > 120.0 for row in rows)
    assert found.accepted == ends + lost == len(rows)
    if found.proven:
        assert not lost + found.lost
        assert all(row.paid_attempts < 2 for row in rows)
    if rows:
        assert not audit([*rows, replace(rows[0])], NOW, 120.0).proven


def test_a_full_file_is_followed_by_the_next_and_requests_stay_whole(tmp_path: Path) -> None:
    folder = tmp_path / "ledger"
    with ledger(tmp_path, rotate_bytes=1) as book:
        book.accept(RequestId("old"), 100.0)
        wait_until(lambda: book.files > 1, 5, "the next file")
        book.accept(RequestId("new"), 101.0)
        tried(book, "new", 1, "local/a", AttemptOutcome.ANSWERED)
        book.end(RequestId("new"), 102.0, Outcome.ANSWERED, backend="local/a", images=1)
        tried(book, "old", 1, "provider/p", AttemptOutcome.ANSWERED, 0.25)
        book.end(RequestId("old"), 102.0, Outcome.ANSWERED, backend="provider/p", images=1)
    assert checked(tmp_path).proven
    assert {row.gateway for row in read_rows(folder)} == {"one"}
    with closing(sqlite3.connect(folder / "one.sqlite")) as db:
        assert db.execute("SELECT request_id, outcome FROM requests").fetchall() == [("old", "answered")]
        assert db.execute("SELECT request_id FROM attempts").fetchall() == [("old",)]
    with ledger(tmp_path) as again:
        assert again.spent_usd("provider/p") == 0.25
        again.accept(RequestId("later"), 103.0)
        again.end(RequestId("later"), 104.0, Outcome.CANCELLED)
        files = again.files
    assert [row.request_id for row in read_audited(folder, 103.0)] == ["later"]
    assert len(list(folder.glob("*.sqlite"))) == files


def test_the_command_says_it_and_ends_with_1_where_it_is_not_proven(tmp_path: Path) -> None:
    runner = CliRunner()
    with ledger(tmp_path) as book:
        book.accept(RequestId("c"), 100.0)
        book.end(RequestId("c"), 101.0, Outcome.CANCELLED)
    arguments = ["audit", "--state-dir", str(tmp_path), "--since", "1970-01-01T00:00+00:00"]
    good = runner.invoke(app, arguments)
    assert (good.exit_code, "accepted 1 = answered 0 + refused 0 + cancelled 1" in good.output) == (0, True)
    with ledger(tmp_path) as book:
        book.accept(RequestId("lost"), 100.0)
    bad = runner.invoke(app, arguments)
    assert bad.exit_code == 1
    assert "NOT proven" in bad.output
    assert "accepted 2 ≠" in bad.output
    found = json.loads(runner.invoke(app, [*arguments, "--json"]).output)
    assert (found["proven"], found["broken"], found["findings"][0]["request"]) == (False, 1, "lost")
    assert runner.invoke(app, ["audit", "--state-dir", str(tmp_path / "none")]).exit_code == 1


def test_since() -> None:
    assert since_of("90m", NOW) == NOW - 5400
    assert since_of("1970-01-01T01:00+00:00", NOW) == 3600.0
    with pytest.raises(ConfigError, match="hint"):
        since_of("yesterday", NOW)
