"""What the soak's script and its judgement promise, without a cluster."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.contract import Machine
from benchmarks.soak.faults import CHANGES_SIZE, FIRST, LAST, LASTS_S, SHARES, Kind, script
from benchmarks.soak.summary import Happened, Summary, page, write
from benchmarks.soak.verdict import (
    Check,
    compare,
    curve_checks,
    goodput_checks,
    newest,
    request_checks,
)


@given(st.integers(0, 10**6), st.integers(len(Kind), 200))
def test_a_script_is_whole_and_in_order(seed: int, count: int) -> None:
    faults = script(seed, count)
    assert [fault.number for fault in faults] == list(range(1, count + 1))
    shares = [fault.at_share for fault in faults]
    assert shares == sorted(shares)
    assert FIRST <= shares[0] <= shares[-1] <= LAST
    kinds = Counter(fault.kind for fault in faults)
    assert set(kinds) == set(Kind)
    for kind, times in kinds.items():
        fair = count * SHARES[kind] / sum(SHARES.values())
        assert times == 1 or abs(times - fair) <= 1 + len(Kind) / 2
    for fault in faults:
        least, most = LASTS_S.get(fault.kind, (0.0, 0.0))
        assert least <= fault.lasts_s <= most
        assert 0 <= fault.draw < 1
        if fault.kind in CHANGES_SIZE:
            assert fault.number > count // 2


def test_the_same_seed_is_the_same_script_and_another_is_another() -> None:
    assert script(7, 42) == script(7, 42)
    assert script(7, 42) != script(8, 42)


def test_too_few_faults_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 7, one fault of each kind; got 3"):
        script(1, 3)


def row(step: int, generation: int = 1, world_size: int = 6, loss: float | None = None) -> dict[str, Any]:
    known = loss if loss is not None else round(1 / step, 6)
    return {"step": step, "generation": generation, "world_size": world_size, "loss": known}


UNDISTURBED = [row(step, generation=0) for step in range(1, 201)]


def test_steps_that_were_done_again_count_once() -> None:
    ours = [*map(row, range(1, 31)), *(row(step, generation=2) for step in range(21, 201))]
    curves = compare(ours, UNDISTURBED, 200)
    assert (curves.missing, curves.doubled, curves.backwards) == ((), (), ())
    assert (curves.exact_steps, curves.same_size_steps, curves.worst) == (200, 200, 0.0)
    assert newest(ours)[25]["generation"] == 2
    assert newest(reversed(ours))[25]["generation"] == 2
    assert all(check.holds for check in curve_checks(curves, 0.0))


def failing(curves: Any, tolerance: float = 0.01) -> list[str]:
    return [check.name.split()[0] for check in curve_checks(curves, tolerance) if not check.holds]


def test_a_missing_step_a_doubled_one_and_a_dead_generations_are_found() -> None:
    whole = list(map(row, range(1, 201)))
    assert compare(whole[:99] + whole[100:], UNDISTURBED, 200).missing == (100,)
    assert compare([*whole, row(150)], UNDISTURBED, 200).doubled == (150,)
    late = [row(step, generation=3 if step == 40 else 1) for step in range(1, 201)]
    assert compare(late, UNDISTURBED, 200).backwards == (41,)
    for rows in (whole[:99] + whole[100:], [*whole, row(150)], late):
        assert failing(compare(rows, UNDISTURBED, 200)) == ["every"]


def test_one_wrong_digit_at_the_same_size_is_found() -> None:
    ours = [row(step, loss=round(1 / step, 6) + (1e-6 if step == 60 else 0)) for step in range(1, 201)]
    curves = compare(ours, UNDISTURBED, 200)
    assert (curves.exact_steps, curves.same_size_steps) == (59, 200)
    assert failing(curves) == ["losses"]


def test_another_size_may_round_but_not_drift() -> None:
    def ours(off: float) -> list[dict[str, Any]]:
        return [
            row(step, world_size=6 if step < 100 else 5, loss=1 / step * (1 if step < 100 else 1 + off))
            if step >= 100
            else row(step)
            for step in range(1, 201)
        ]

    rounded = compare(ours(0.001), UNDISTURBED, 200)
    assert (rounded.exact_steps, rounded.same_size_steps) == (99, 99)
    assert 0.0005 < rounded.worst < 0.002
    assert failing(rounded) == []
    drifted = compare(ours(0.05), UNDISTURBED, 200)
    assert failing(drifted) == ["loss"]
    assert drifted.worst_step in (101, 151)


def test_an_undisturbed_run_that_is_not_whole_judges_nothing() -> None:
    with pytest.raises(ValueError, match="no step 200"):
        compare(UNDISTURBED, UNDISTURBED[:-1], 200)


TOTALS = {"sent": 3, "local": 1, "spilled": 2, "refused": 0, "cancelled": 0, "failed": 0, "open": 0}


def client(*problems: str | None) -> list[dict[str, Any]]:
    return [{"request_id": f"r{number}", "problem": problem} for number, problem in enumerate(problems)]


@pytest.mark.parametrize(
    ("lines", "totals", "ended", "asked", "wrong"),
    [
        (client(None, None, None), TOTALS, {"r0": 1, "r1": 1, "r2": 1, "other": 1}, 3, []),
        (client(None, None, "status 500"), TOTALS, {"r0": 1, "r1": 1, "r2": 1}, 3, ["no failed request"]),
        (client(None, None, None), TOTALS, {"r0": 1, "r1": 1}, 3, ["every request ended exactly once"]),
        (client(None, None, None), TOTALS, {"r0": 1, "r1": 2, "r2": 1}, 3, ["every request ended exactly once"]),
        (client(None, None, None), TOTALS, {"r0": 1, "r1": 1, "r2": 1}, 4, ["every request ended exactly once"]),
        (
            client(None, None, None),
            {**TOTALS, "open": 1},
            {"r0": 1, "r1": 1, "r2": 1},
            3,
            ["every request ended exactly once", "the ledger's sums agree"],
        ),
    ],
)
def test_requests(
    lines: list[dict[str, Any]], totals: dict[str, float], ended: dict[str, int], asked: int, wrong: list[str]
) -> None:
    assert [check.name for check in request_checks(lines, totals, ended, asked) if not check.holds] == wrong


def test_goodput_must_sum_to_one_and_account_for_every_gpu_second() -> None:
    good = goodput_checks({"serving": 0.25, "productive": 0.75}, 990.0, 1000.0, slack=0.02)
    assert all(check.holds for check in good)
    assert not goodput_checks({"serving": 0.25, "productive": 0.7}, 1000.0, 1000.0, slack=0.02)[0].holds
    assert not goodput_checks({"serving": 1.0}, 900.0, 1000.0, slack=0.02)[1].holds
    assert not goodput_checks({"serving": 1.0}, 1100.0, 1000.0, slack=0.02)[1].holds


def test_the_summary_says_what_did_not_hold(tmp_path: Path) -> None:
    happened = [
        Happened(number=n, kind="rank_kill", what="SIGKILL", at_s=n, step=n, healed_after_s=float(n)) for n in (1, 2, 6)
    ]
    summary = Summary(
        minutes=30.0,
        seed=1,
        faults=happened,
        requests={"sent": 10},
        training={"steps": 5},
        goodput={"serving": 1.0, "free": 0.0},
        checks=(Check(name="good", holds=True, detail="a"), Check(name="bad", holds=False, detail="b")),
        versions={},
        machine=Machine(cpu="x", cores=2, memory_bytes=1),
        at="2030-01-01T00:00:00+00:00",
    )
    assert not summary.holds
    text = page(summary)
    assert "3 faults: NOT everything held" in text
    assert "| bad | no | b |" in text
    assert "| rank_kill | 3 | 2.0 s | 6.0 s |" in text
    write(summary, tmp_path)
    kept = json.loads((tmp_path / "soak.json").read_text())
    assert kept["holds"] is False
    assert kept["checks"][1] == {"name": "bad", "holds": False, "detail": "b"}
