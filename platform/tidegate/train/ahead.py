"""What the next step needs is made while this one runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

Item = TypeVar("Item")
Made = TypeVar("Made")


@contextmanager
def one_ahead(items: Iterable[Item], make: Callable[[Item], Made]) -> Iterator[Iterator[Made]]:
    """`make` of each item in order, the next one in a thread of its own while the one before is used. What `items` or
    `make` raises is raised where that item is asked for."""
    rest = iter(items)

    def following() -> tuple[Made] | None:
        for item in rest:
            return (make(item),)
        return None

    with ThreadPoolExecutor(1, thread_name_prefix="one-ahead") as thread:

        def made() -> Iterator[Made]:
            waits: Future[tuple[Made] | None] = thread.submit(following)
            while (one := waits.result()) is not None:
                waits = thread.submit(following)
                yield one[0]

        try:
            yield made()
        finally:
            thread.shutdown(cancel_futures=True)
