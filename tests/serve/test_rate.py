"""So many at once, evenly as many a minute."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidegate.serve.rate import Rate, take


def test_a_burst_then_one_by_one() -> None:
    rate, due_s, now_s = Rate(6), 0.0, 1e9
    for _ in range(6):
        due_s, wait_s = take(due_s, rate, now_s)
        assert wait_s == 0
    due_s, wait_s = take(due_s, rate, now_s)
    assert abs(wait_s - 10) < 1e-5
    assert take(due_s, rate, now_s + 10)[1] == 0
    assert take(due_s, rate, now_s + 9)[1] > 0


@given(st.integers(1, 600), st.lists(st.floats(0, 20), min_size=1, max_size=200))
def test_no_minute_holds_more_than_a_burst_and_the_rate(per_min: int, pauses: list[float]) -> None:
    rate, due_s, now_s = Rate(per_min), 0.0, 1e9
    taken: list[float] = []
    for pause in pauses:
        now_s += pause
        due_s, wait_s = take(due_s, rate, now_s)
        if wait_s == 0:
            taken.append(now_s)
        else:
            assert take(due_s, rate, now_s + wait_s)[1] == 0  # what it says is enough
    for start_s in taken:
        assert sum(start_s <= at_s < start_s + 60 for at_s in taken) <= 2 * per_min + 1


def test_a_clock_that_was_set_back_locks_nobody_out() -> None:
    due_s, _ = take(0.0, Rate(1), 1e9)
    assert take(due_s, Rate(1), 1e9 - 86_400)[1] <= 60
