"""The bell wakes an agent for news, once for each, and never keeps it awake."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from multiprocessing.connection import wait

import pytest

from tidegate.gang.bell import Bell
from waiting import wait_until


class Coordinator:
    """Answers as it is told."""

    def __init__(self) -> None:
        self.answers: queue.Queue[bool | Exception] = queue.Queue()
        self.asked = threading.Semaphore(0)
        self.times = 0

    def wait_for_news(self) -> bool:
        self.times += 1
        self.asked.release()
        answer = self.answers.get()
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def coordinator() -> Coordinator:
    return Coordinator()


@pytest.fixture
def bell(coordinator: Coordinator) -> Iterator[Bell]:
    bell = Bell(coordinator.wait_for_news, rest_s=0.01)
    yield bell
    bell.close()
    coordinator.answers.put(False)


def rings(bell: Bell, timeout_s: float) -> bool:
    return bool(wait([bell.ear], timeout=timeout_s))


def test_it_rings_for_news_and_is_silent_once_they_are_taken_in(coordinator: Coordinator, bell: Bell) -> None:
    assert not rings(bell, 0)
    coordinator.answers.put(True)
    assert rings(bell, 5)
    assert coordinator.times == 1, "it does not ask again before that"
    bell.taken_in()
    assert not rings(bell, 0)
    wait_until(lambda: coordinator.times == 2, 5, "the next question")


def test_no_news_is_asked_again_without_a_ring(coordinator: Coordinator, bell: Bell) -> None:
    coordinator.answers.put(False)
    wait_until(lambda: coordinator.times == 2, 5, "the next question")
    assert not rings(bell, 0)


def test_a_coordinator_that_is_away_is_asked_again(coordinator: Coordinator, bell: Bell) -> None:
    coordinator.answers.put(RuntimeError("away"))
    coordinator.answers.put(True)
    assert rings(bell, 5)


def test_after_its_end_it_writes_to_nobody(coordinator: Coordinator) -> None:
    bell = Bell(coordinator.wait_for_news, rest_s=0.01)
    wait_until(lambda: coordinator.times == 1, 5, "the first question")
    bell.close()
    coordinator.answers.put(True)
    thread = next((t for t in threading.enumerate() if t.name == "bell" and t.is_alive()), None)
    if thread is not None:
        thread.join(5)
        assert not thread.is_alive()
