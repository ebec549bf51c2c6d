"""What is stepped together, and what is shown on the way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.serve.batching import buckets, parts, paying, shown_after
from tidegate.serve.fitting import Room
from tidegate.serve.work import Size


@pytest.mark.parametrize(("most", "expected"), [(1, (1,)), (4, (1, 2, 4)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8))])
def test_buckets(most: int, expected: tuple[int, ...]) -> None:
    assert buckets(most) == expected


@pytest.mark.parametrize(
    ("step_s", "used"),
    [
        ({1: 1.0, 2: 2.0, 4: 4.0}, [1]),  # one picture saturates the device
        ({1: 1.0, 2: 1.9, 4: 3.7}, [1]),  # five per cent are not worth being late
        ({1: 1.0, 2: 1.1, 4: 1.3}, [1, 2, 4]),
        ({1: 1.0, 2: 1.1, 4: 2.2}, [1, 2]),
        ({1: 1.0, 2: 2.0, 4: 2.4}, [1, 4]),
    ],
)
def test_batches_are_used_only_where_they_pay(step_s: dict[int, float], used: list[int]) -> None:
    assert list(paying(step_s)) == used


costs = st.fixed_dictionaries({1: st.floats(0.1, 9)}, optional={size: st.floats(0.1, 9) for size in (2, 4, 8)})


@given(pictures=st.integers(1, 12), step_s=costs)
def test_a_round_is_never_dearer_than_one_by_one(pictures: int, step_s: dict[int, float]) -> None:
    chosen = parts(pictures, step_s)
    assert sum(chosen) >= pictures
    assert sum(chosen) - min(chosen) < pictures  # no bucket is left empty
    assert sum(step_s[size] for size in chosen) <= pictures * step_s[1] + 1e-9


def test_a_batch_between_two_buckets_is_filled_up_or_split() -> None:
    assert parts(3, {1: 1.0, 2: 1.2, 4: 1.4}) == (4,)
    assert parts(3, {1: 1.0, 2: 1.2, 4: 3.0}) == (2, 1)
    assert parts(7, {1: 1.0}) == (1,) * 7


@pytest.mark.parametrize(
    ("partials", "steps", "expected"), [(0, 28, ()), (1, 28, (14,)), (3, 8, (2, 4, 6)), (3, 2, (1,)), (3, 1, ())]
)
def test_when_unfinished_pictures_are_shown(partials: int, steps: int, expected: tuple[int, ...]) -> None:
    assert shown_after(partials, steps) == expected


def test_the_memory_guard_knows_before_it_tries() -> None:
    """What was measured small says what larger shapes take, on top of what is held."""
    room = Room(limit_bytes=1000, held_bytes=400)
    small, large = Size(10, 10), Size(30, 10)
    assert room.problem(large, 4) is None  # nothing is known yet
    room.measured(small, 1, 100)
    assert room.expected_bytes(large, 1) == 700
    assert room.problem(large, 3) is not None
    assert room.problem(small, 6) is None
    assert room.problem(small, 7) is not None
    assert Room(limit_bytes=None, held_bytes=400).problem(large, 10**6) is None
