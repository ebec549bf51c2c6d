"""Where jobs are kept: SQLite and a real Redis sit the same exam."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import pytest

from tidegate.serve.job_store import JobStore, KeyReusedError
from tidegate.serve.jobs import ENDED, Job, JobStatus
from tidegate.serve.redis_job_store import RedisJobStore, connect_redis

Store: TypeAlias = JobStore | RedisJobStore
Open: TypeAlias = Callable[[str], Store]
LEASE_S = 5.0
ALL = tuple(JobStatus)


@pytest.fixture(params=["sqlite", "redis"])
def gateway(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """Opens the store as the gateway of that name."""
    opened: list[Store] = []
    server = request.getfixturevalue("redis") if request.param == "redis" else None
    prefix = tmp_path.name

    def open_as(owner: str) -> Store:
        if server is None:
            opened.append(JobStore(tmp_path / "jobs.sqlite", owner, LEASE_S))
        else:
            opened.append(RedisJobStore(connect_redis(server.spec, {}), prefix, owner, LEASE_S))
        return opened[-1]

    yield open_as
    for store in opened:
        store.close()


def job(name: str, caller: str = "acme", **more: object) -> Job:
    one = Job(
        id=name,
        caller=caller,
        priority=0,
        body='{"prompt": "ä"}',
        model="m",
        seed=7,
        webhook_url=None,
        created_at_s=1.5,
    )
    return replace(one, **more)  # type: ignore[arg-type]


def put(store: Store, *jobs: Job) -> None:
    for one in jobs:
        assert store.submit(one, 1000, None, b"") is not None


def test_a_job_comes_back_as_it_was_stored_and_only_to_its_caller(gateway: Open) -> None:
    store = gateway("g")
    one = job("a", webhook_url="http://h/x", seed=2**40)
    assert store.submit(one, 10, None, b"d") == one
    assert gateway("other").find("a", "acme") == one
    assert store.find("a", "else") is None
    assert store.find("b", "acme") is None


def test_a_key_finds_its_job_and_another_body_is_refused(gateway: Open) -> None:
    store = gateway("g")
    store.submit(job("a"), 10, "k:1", b"\x00d")
    again = gateway("h").submit(job("b"), 10, "k:1", b"\x00d")
    assert again is not None
    assert again.id == "a"
    assert store.find("b", "acme") is None
    with pytest.raises(KeyReusedError):
        store.submit(job("c"), 10, "k:1", b"other")
    assert store.submit(job("d", caller="else"), 10, "k:1", b"other") is not None


def test_too_many_wait(gateway: Open) -> None:
    store = gateway("g")
    assert [store.submit(job(name), 2, None, b"") is None for name in "abc"] == [False, False, True]
    assert store.submit(job("d", caller="else"), 2, None, b"") is not None
    assert len(store.start(2.0, {}, 1)) == 1
    assert store.submit(job("e"), 2, None, b"") is not None


def test_who_starts_by_class_then_turn_and_within_each_callers_limit(gateway: Open) -> None:
    store, other = gateway("g"), gateway("h")
    put(store, job("a"), job("b"), job("c"), job("x", caller="else"), job("first", caller="else", priority=-1))
    assert [one.id for one in store.start(2.0, {"acme": 2}, 4)] == ["first", "a", "b", "x"]
    assert store.running() == {"acme": 2, "else": 2}
    assert other.start(2.0, {"acme": 2}, 4) == []
    assert [one.id for one in other.start(2.0, {"acme": None}, 4)] == ["c"]
    started = store.find("a", "acme")
    assert started is not None
    assert (started.status, started.run, started.started_at_s) == (JobStatus.RUNNING, 1, 2.0)
    assert started.request == "a-1"


def test_an_end_is_this_gateways_and_comes_once(gateway: Open) -> None:
    store, other = gateway("g"), gateway("h")
    put(store, job("a"))
    store.start(2.0, {}, 1)
    assert not other.end("a", 3.0, JobStatus.FAILED, error="{}")
    assert store.end("a", 3.0, JobStatus.SUCCEEDED, answer='{"data": []}', backend="local/p", computed_s=0.5)
    assert not store.end("a", 4.0, JobStatus.FAILED, error="{}")
    ended = other.find("a", "acme")
    assert ended is not None
    assert (ended.status, ended.answer, ended.computed_s, ended.ended_at_s) == ("succeeded", '{"data": []}', 0.5, 3.0)
    assert store.running() == {}


def test_a_dead_gateways_jobs_are_taken_over_except_what_may_have_been_paid(gateway: Open) -> None:
    dead, lives = gateway("dead"), gateway("lives")
    put(dead, job("local"), job("paid", webhook_url="http://h/x"), job("refused"))
    dead.start(10.0, {}, 3)
    assert dead.buying("paid", True)
    assert dead.buying("refused", True)
    assert dead.buying("refused", False)
    assert lives.recover(14.0, "lost") == 0
    assert dead.renew(12.0) == set()
    assert lives.recover(16.0, "lost") == 0, "its lease was renewed"
    assert lives.recover(18.0, "lost") == 3
    assert not dead.buying("local", True), "it is not its any more"
    paid = lives.find("paid", "acme")
    assert paid is not None
    assert (paid.status, paid.error) == (JobStatus.FAILED, "lost")
    assert [one.id for one in lives.due_deliveries(18.0, 20.0, 9)] == ["paid"]
    again = lives.start(18.0, {}, 9)
    assert [(one.id, one.run) for one in again] == [("local", 2), ("refused", 2)]


def test_a_gateway_that_ends_gives_its_own_back(gateway: Open) -> None:
    one, two = gateway("one"), gateway("two")
    put(one, job("a"), job("b"))
    one.start(2.0, {}, 1)
    two.start(2.0, {}, 1)
    assert one.recover(3.0, "lost", mine=True) == 1
    assert one.recover(3.0, "lost", mine=True) == 0
    assert [job.id for job in two.start(3.0, {}, 5)] == ["a"]


def test_cancelling(gateway: Open) -> None:
    store, other = gateway("g"), gateway("h")
    put(store, job("a"), job("b"))
    store.start(2.0, {}, 1)
    assert other.cancel("a", "else", 3.0) is None
    assert store.renew(3.0) == set()
    running, queued = other.cancel("a", "acme", 3.0), other.cancel("b", "acme", 3.0)
    assert running is not None
    assert queued is not None
    assert (running.status, queued.status) == (JobStatus.RUNNING, JobStatus.CANCELLED)
    assert store.renew(3.0) == {"a"}
    assert store.start(4.0, {}, 5) == []
    assert store.end("a", 5.0, JobStatus.CANCELLED)
    assert other.cancel("a", "acme", 6.0) == store.find("a", "acme")


def test_webhooks_are_due_once_held_and_tried_again(gateway: Open) -> None:
    store, other = gateway("g"), gateway("h")
    put(store, job("a", webhook_url="http://h/x"), job("quiet"))
    store.start(2.0, {}, 2)
    store.end("a", 3.0, JobStatus.SUCCEEDED, answer="{}")
    store.end("quiet", 3.0, JobStatus.SUCCEEDED, answer="{}")
    assert [one.id for one in store.due_deliveries(3.0, 20.0, 9)] == ["a"]
    assert other.due_deliveries(3.0, 20.0, 9) == []
    store.delivered("a", delivered_at_s=None, next_at_s=30.0)
    assert other.due_deliveries(29.0, 20.0, 9) == []
    (again,) = other.due_deliveries(30.0, 20.0, 9)
    assert (again.deliveries, again.answer) == (1, None)
    store.forget(100.0)
    assert store.find("quiet", "acme") is None
    assert store.find("a", "acme") is not None, "its webhook is still to be delivered"
    other.delivered("a", delivered_at_s=31.0, next_at_s=None)
    done = store.find("a", "acme")
    assert done is not None
    assert (done.deliveries, done.delivered_at_s) == (2, 31.0)
    store.forget(100.0)
    assert store.find("a", "acme") is None


def test_a_forgotten_jobs_key_may_be_used_again(gateway: Open) -> None:
    store = gateway("g")
    store.submit(job("a"), 10, "k", b"1")
    store.cancel("a", "acme", 2.0)
    store.forget(3.0)
    again = store.submit(job("b"), 10, "k", b"2")
    assert again is not None
    assert again.id == "b"


def test_listing(gateway: Open) -> None:
    store = gateway("g")
    put(store, *(job(f"j{number}") for number in range(120)), job("other", caller="else"))
    store.start(2.0, {}, 2)
    store.end("j0", 3.0, JobStatus.SUCCEEDED, answer="{}")
    first = store.listed("acme", after=None, limit=3, statuses=ALL)
    assert first is not None
    assert [one.id for one in first] == ["j119", "j118", "j117"]
    after = store.listed("acme", after="j117", limit=2, statuses=ALL)
    assert after is not None
    assert [one.id for one in after] == ["j116", "j115"]
    ended = store.listed("acme", after=None, limit=9, statuses=tuple(ENDED))
    assert ended is not None
    assert [(one.id, one.answer) for one in ended] == [("j0", None)]
    assert store.listed("acme", after="other", limit=2, statuses=ALL) is None
    assert store.listed("nobody", after=None, limit=2, statuses=ALL) == []


def test_gateways_that_take_at_the_same_time_take_each_job_once(gateway: Open) -> None:
    put(gateway("first"), *(job(f"j{number}", caller=f"c{number % 3}") for number in range(40)))
    taken: list[tuple[str, str]] = []

    def take(owner: str) -> None:
        store, chance = gateway(owner), random.Random(owner)
        while started := store.start(2.0, {}, chance.randrange(1, 4)):
            taken.extend((owner, one.id) for one in started)
            for one in started:
                assert store.end(one.id, 3.0, JobStatus.SUCCEEDED, answer="{}")

    takers = [threading.Thread(target=take, args=(f"g{number}",)) for number in range(3)]
    for taker in takers:
        taker.start()
    for taker in takers:
        taker.join(30)
    assert Counter(one for _, one in taken) == dict.fromkeys((f"j{number}" for number in range(40)), 1)
