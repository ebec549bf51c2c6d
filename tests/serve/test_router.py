"""Our router class on a loop of its own with stand-in replicas: the traps of its base class, one by one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve.request_router import PendingRequest

from tidegate.ids import PoolName
from tidegate.serve.router import SpillRouter
from tidegate.serve.router_registry import ROUTERS, PoolSeen
from tidegate.serve.work import PoolBusyError
from virtual_time import VirtualTimeLoop, passes
from waiting import until

POOL = DeploymentID("pool-a", "images")


@dataclass
class Replica:
    """What the router asks of a replica. `queue` None = it never answers, -1 = it can't be reached; `broken` = even its
    limit can't be read."""

    name: str
    queue: int | None = 0
    broken: bool = False
    asked: int = 0
    replica_id: ReplicaID = field(init=False)

    def __post_init__(self) -> None:
        self.replica_id = ReplicaID(self.name, POOL)

    @property
    def max_ongoing_requests(self) -> int:
        if self.broken:
            raise RuntimeError("broken replica")
        return 2

    async def get_queue_len(self, *, deadline_s: float) -> int:
        self.asked += 1
        if self.queue is None:
            await asyncio.Event().wait()
        assert self.queue is not None
        if self.queue < 0:
            raise ConnectionError("unreachable")
        return self.queue


def router_of(*replicas: Replica) -> Any:
    router: Any = SpillRouter(
        deployment_id=POOL, handle_source=DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True
    )
    router.initialize_state(pool=POOL.name)
    router.update_replicas(list(replicas))
    return router


def request(name: str = "r") -> PendingRequest:
    metadata = RequestMetadata(request_id=name, internal_request_id=name, call_method="make")
    return PendingRequest(args=[], kwargs={}, metadata=metadata)


def in_loop(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(5):
            await story()

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(bounded())


def test_it_registers_itself() -> None:
    async def story() -> None:
        router = router_of(Replica("a"), Replica("b"))
        assert ROUTERS[PoolName(POOL.name)] is router
        assert router.seen() == PoolSeen(replicas=2, ongoing=0, slots_each=2)

    in_loop(story)


def test_a_free_replica_is_chosen() -> None:
    async def story() -> None:
        free, full = Replica("free", queue=1), Replica("full", queue=2)
        router = router_of(free, full)
        await until(lambda: free.asked and full.asked, 10, "both were asked")
        assert await router._choose_replica_for_request(request()) is free
        assert not router._pending_requests_by_id

    in_loop(story)


def test_the_choice_takes_no_turn_of_the_loop_while_all_queues_are_known() -> None:
    async def story() -> None:
        replicas = Replica("idle", queue=0), Replica("busy", queue=1)
        router = router_of(*replicas)
        await until(lambda: all(one.asked for one in replicas), 10, "both were asked")
        with pytest.raises(StopIteration) as chosen:
            router._choose_replica_for_request(request()).send(None)
        assert chosen.value.value is replicas[0]

    in_loop(story)


def test_a_full_pool_refuses_at_once_and_forgets_the_request() -> None:
    async def story() -> None:
        full = Replica("full", queue=2)
        router = router_of(full)
        await until(lambda: full.asked, 10, "it was asked")
        with pytest.raises(PoolBusyError):
            await router._choose_replica_for_request(request())
        assert not router._pending_requests_by_id

    in_loop(story)


def test_an_empty_pool_refuses_at_once() -> None:
    async def story() -> None:
        with pytest.raises(PoolBusyError):
            await router_of()._choose_replica_for_request(request())

    in_loop(story)


def test_a_pool_that_becomes_empty_refuses_those_in_hand() -> None:
    async def story() -> None:
        silent = Replica("silent", queue=None)
        router = router_of(silent)
        choosing = asyncio.create_task(router._choose_replica_for_request(request()))
        await until(lambda: silent.asked >= 2, 10, "it was asked when it joined, and for the request")
        router.update_replicas([])
        with pytest.raises(PoolBusyError):
            await choosing
        assert not router._pending_requests_by_id

    in_loop(story)


def test_a_replica_that_cannot_be_reached_is_not_asked_in_a_hot_loop() -> None:
    async def story() -> None:
        unreachable = Replica("unreachable", queue=-1)
        router = router_of(unreachable)
        choosing = asyncio.create_task(router._choose_replica_for_request(request()))
        await passes(0.2)
        assert 2 <= unreachable.asked < 20
        choosing.cancel()
        await asyncio.gather(choosing, return_exceptions=True)
        assert not router._pending_requests_by_id

    in_loop(story)


def test_a_fault_in_choosing_reaches_the_caller() -> None:
    """The base class would log it and leave the request hanging for ever."""

    async def story() -> None:
        router = router_of(Replica("broken", broken=True))
        router.on_new_queue_len_info(ReplicaID("broken", POOL), 1)
        with pytest.raises(RuntimeError, match="broken replica"):
            await router._choose_replica_for_request(request())

    in_loop(story)


def test_a_queue_longer_than_what_was_sent_is_asked_for_again() -> None:
    async def story() -> None:
        replica = Replica("a")
        router = router_of(replica)
        await until(lambda: replica.asked, 10, "it was asked")
        router.on_send_request(replica.replica_id)
        router.on_send_request(replica.replica_id)
        asked = replica.asked
        assert router.seen().ongoing == 2
        await passes(0.01)
        assert replica.asked == asked  # all of it is ours: no doubt
        router.on_request_completed(replica.replica_id, "one")
        router.on_request_completed(replica.replica_id, "two")
        assert router.seen().ongoing == 2  # the cache was not told
        await until(lambda: not router.seen().ongoing, 10, "the doubt is resolved")
        assert replica.asked == asked + 1

    in_loop(story)
