"""What became of every request: written off the loop, read back over all gateways."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tidegate.ids import GatewayId, RequestId
from tidegate.serve.audit import audit
from tidegate.serve.ledger import Attempt, AttemptOutcome, EndedTwiceError, Ledger, Outcome
from tidegate.serve.ledger_reading import read_audited, read_rows, read_totals
from waiting import wait_until


def attempt(request: str, number: int, backend: str, outcome: AttemptOutcome, **cost: float) -> Attempt:
    return Attempt(
        request=RequestId(request),
        attempt=number,
        backend=backend,
        started_at_s=1.0,
        ended_at_s=2.0,
        outcome=outcome,
        price_usd=cost.get("price_usd", 0.0),
        compute_s=cost.get("compute_s", 0.0),
    )


def test_totals_over_two_gateways(tmp_path: Path) -> None:
    one, two = Ledger(tmp_path, GatewayId("one")), Ledger(tmp_path, GatewayId("two"))
    for number, name in enumerate(["a", "b", "c", "d"]):
        one.accept(RequestId(name), float(number))
    one.attempt(attempt("a", 1, "local/pool", AttemptOutcome.ANSWERED, compute_s=0.25))
    one.end(RequestId("a"), 5.0, Outcome.ANSWERED, backend="local/pool", images=2)
    one.attempt(attempt("b", 1, "local/pool", AttemptOutcome.LOST))
    one.attempt(attempt("b", 2, "provider/p", AttemptOutcome.ANSWERED, price_usd=0.04))
    one.end(RequestId("b"), 6.0, Outcome.ANSWERED, backend="provider/p", images=1)
    one.end(RequestId("c"), 6.0, Outcome.REFUSED, reason="'n': must be 1 to 10, got 11")
    two.accept(RequestId("e"), 0.5)
    two.end(RequestId("e"), 1.0, Outcome.CANCELLED)
    two.accept(RequestId("f"), 0.6)
    two.end(RequestId("f"), 1.0, Outcome.FAILED, reason="nothing answered")
    one.close()
    two.close()

    totals = read_totals(tmp_path)
    assert totals == {
        "sent": 6,
        "local": 1,
        "spilled": 1,
        "refused": 1,
        "cancelled": 1,
        "failed": 1,
        "lost": 0,
        "open": 1,
        "images": 3,
        "attempts": 3,
        "canaries": 0,
        "price_usd": 0.04,
        "compute_s": 0.25,
    }
    rows = {row.request_id: row for row in read_rows(tmp_path)}
    assert (rows["b"].outcome, rows["b"].backend, rows["b"].attempts) == ("answered", "provider/p", 2)
    assert (rows["c"].outcome, rows["c"].reason) == ("refused", "'n': must be 1 to 10, got 11")
    assert (rows["d"].outcome, rows["d"].ended_at_s) == (None, None)
    assert (rows["e"].gateway, rows["a"].gateway) == ("two", "one")


def test_a_gateway_that_comes_back_goes_on_with_its_sums(tmp_path: Path) -> None:
    for _ in range(2):
        ledger = Ledger(tmp_path, GatewayId("one"))
        before = ledger.spent_usd()
        ledger.attempt(attempt(f"a{before}", 1, "provider/p", AttemptOutcome.ANSWERED, price_usd=0.25))
        ledger.attempt(attempt(f"a{before}", 2, "provider/q", AttemptOutcome.LOST, price_usd=0.5))
        ledger.attempt(attempt(f"a{before}", 3, "local/a", AttemptOutcome.ANSWERED, compute_s=1.0))
        assert ledger.spent_usd() == before + 0.75
        ledger.close()
    again = Ledger(tmp_path, GatewayId("one"))
    assert (again.spent_usd(), again.spent_usd("provider/q"), again.spent_usd("local/a")) == (1.5, 1.0, 0.0)
    again.close()
    other = Ledger(tmp_path, GatewayId("two"))
    assert other.spent_usd() == 0.0
    other.close()


def test_totals_between_two_times(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, GatewayId("one"))
    for at_s in (1.0, 2.0, 3.0):
        ledger.accept(RequestId(f"r{at_s}"), at_s)
        paid = replace(attempt(f"r{at_s}", 1, "provider/p", AttemptOutcome.ANSWERED, price_usd=at_s), started_at_s=at_s)
        ledger.attempt(paid)
        ledger.end(RequestId(f"r{at_s}"), at_s + 9, Outcome.ANSWERED, backend="provider/p", images=1)
    ledger.close()
    some = read_totals(tmp_path, since_s=2.0, until_s=3.0)
    assert (some["sent"], some["spilled"], some["attempts"], some["price_usd"]) == (1, 1, 1, 2.0)
    assert read_totals(tmp_path)["price_usd"] == 6.0


def test_a_request_ends_once(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, GatewayId("one"))
    ledger.accept(RequestId("a"), 0.0)
    ledger.end(RequestId("a"), 1.0, Outcome.ANSWERED, backend="local/pool")
    with pytest.raises(EndedTwiceError):
        ledger.end(RequestId("a"), 2.0, Outcome.FAILED)
    with pytest.raises(EndedTwiceError):
        ledger.end(RequestId("never accepted"), 2.0, Outcome.FAILED)
    ledger.close()
    (row,) = read_rows(tmp_path)
    assert (row.outcome, row.ended_at_s) == ("answered", 1.0)


def test_rows_reach_the_disk_by_themselves(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, GatewayId("one"))
    ledger.accept(RequestId("a"), 0.0)
    wait_until(lambda: read_totals(tmp_path)["sent"] == 1, 5, "the row without a close")
    ledger.close()


def test_a_locked_file_loses_no_row(tmp_path: Path) -> None:
    """What can't be written now is kept and written later, in order."""
    ledger = Ledger(tmp_path, GatewayId("one"), lock_timeout_s=0.05)
    with closing(sqlite3.connect(tmp_path / "one.sqlite")) as other:
        other.execute("BEGIN IMMEDIATE")
        ledger.accept(RequestId("a"), 0.0)
        wait_until(lambda: ledger.write_failures > 0, 5, "a write to fail")
        ledger.end(RequestId("a"), 1.0, Outcome.CANCELLED)
        other.rollback()
    ledger.close()
    (row,) = read_rows(tmp_path)
    assert row.outcome == "cancelled"


def test_an_empty_folder_has_empty_totals(tmp_path: Path) -> None:
    assert set(read_totals(tmp_path).values()) == {0}
    assert list(read_rows(tmp_path)) == []


KILLED = """
import os, signal, sys
from pathlib import Path
from tidegate.serve.ledger import Ledger, Outcome
ledger = Ledger(Path(sys.argv[1]), sys.argv[2], rotate_bytes=1)
ledger.accept("answered", 1.0)
ledger.end("answered", 2.0, Outcome.ANSWERED, backend="local/p", images=1)
ledger.accept("open", 3.0)
while ledger.files == 1:
    pass
ledger.accept("open too", 4.0)
ledger._thread.join(2 * 0.5)
print("written", flush=True)
sys.stdin.read() if sys.argv[3] == "lives" else os.kill(os.getpid(), signal.SIGKILL)
"""


@contextmanager
def other_gateway(folder: Path, name: str, fate: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", KILLED, str(folder), name, fate]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"written\n"
        try:
            yield process
        finally:
            process.kill()


def test_what_a_killed_gateway_left_open_is_closed_by_the_next_one_and_explained(tmp_path: Path) -> None:
    """Rows of its newer file too; those of a gateway that lives, one with nearly the same name, are left alone."""
    with other_gateway(tmp_path, "g1", "lives"):
        with other_gateway(tmp_path, "g", "dies") as killed:
            killed.wait(20)
        next_one = Ledger(tmp_path, GatewayId("next"))
        assert next_one.lost == 2
        again = Ledger(tmp_path, GatewayId("another"))
        assert again.lost == 0
        for ledger in (next_one, again):
            ledger.close()
        assert [path.name for path in sorted(tmp_path.glob("*.lock"))] == ["g1.lock"]
        rows = {(row.gateway, row.request_id): row for row in read_rows(tmp_path)}
        assert (rows["g", "answered"].outcome, rows["g", "open"].outcome) == ("answered", "lost")
        assert "lost by gateway" in (rows["g", "open too"].reason or "")
        assert rows["g1", "open"].outcome is None
        found = audit((row for row in read_audited(tmp_path) if row.gateway == "g"), now_s=1e6, grace_s=60.0)
        assert (found.accepted, found.lost, found.proven) == (3, 2, False)
        assert all("lost by gateway" in finding.what for finding in found.findings if finding.request != "answered")


def test_a_gateway_that_comes_back_under_its_name_closes_its_own(tmp_path: Path) -> None:
    with other_gateway(tmp_path, "g", "dies") as killed:
        killed.wait(20)
    back = Ledger(tmp_path, GatewayId("g"))
    assert back.lost == 2
    back.accept(RequestId("new"), 5.0)
    back.end(RequestId("new"), 6.0, Outcome.REFUSED, reason="test")
    back.close()
    assert read_totals(tmp_path)["open"] == 0
