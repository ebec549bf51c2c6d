"""The next item is made while the one before is used, in order, and errors come where their item is asked for."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tidegate.train.ahead import one_ahead


def test_the_next_is_made_while_one_is_used_and_no_more_than_that() -> None:
    made = {number: threading.Event() for number in range(5)}

    def make(number: int) -> int:
        made[number].set()
        return number * 10

    with one_ahead(range(5), make) as tens:
        assert next(tens) == 0
        assert made[1].wait(10), "the next one is being made while the first is used"
        assert not made[2].is_set()
        assert list(tens) == [10, 20, 30, 40]


def test_an_error_comes_in_its_items_place() -> None:
    def make(number: int) -> int:
        if number == 2:
            raise ValueError("two")
        return number

    with one_ahead(range(5), make) as numbers:
        assert [next(numbers), next(numbers)] == [0, 1]
        with pytest.raises(ValueError, match="two"):
            next(numbers)


def test_an_error_of_the_source_comes_in_its_place() -> None:
    def source() -> Iterator[int]:
        yield 1
        raise OSError("gone")

    with one_ahead(source(), str) as texts:
        assert next(texts) == "1"
        with pytest.raises(OSError, match="gone"):
            next(texts)


def test_whoever_leaves_early_leaves_no_thread() -> None:
    before = threading.active_count()
    with one_ahead(range(1000), str) as texts:
        next(texts)
        assert threading.active_count() == before + 1
    assert threading.active_count() == before
