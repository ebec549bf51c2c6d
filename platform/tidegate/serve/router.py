"""Serve's request router for a pool: it never lets a request wait.

Built on private parts of Serve's router, pinned to Ray 2.60 and covered by `tests/serve/test_serve_cluster.py`.
"""

from __future__ import annotations

import random
import time
from collections import Counter

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from tidegate.ids import PoolName
from tidegate.serve import router_registry
from tidegate.serve.router_registry import PoolSeen
from tidegate.serve.work import PoolBusyError

ASK_S = 0.5
"""Between two such questions of one router."""


class SpillRouter(RequestRouter):
    """Picks among replicas with a free slot; refuses with `PoolBusyError` at once where there is none.

    Three traps of the base class are avoided: an exception in `choose_replicas` leaves the request hanging for ever,
    an empty answer without back-off spins a core, and a refused request stays in an index. A fourth: the cache of
    queue lengths can stay too high (a reply that tells of two may be read when one has ended already, or its call was
    cancelled), and a pool that looks full gets no request whose reply would set it right. So where the cache counts
    more than this process has sent, the replica is asked.

    The base class chooses in tasks of its own, some turns of the event loop later. While all queue lengths are known
    there is nothing to wait for, and the choice is made at once.
    """

    def initialize_state(self, pool: str) -> None:
        self._registered_as = PoolName(pool)
        self._sent: Counter[ReplicaID] = Counter()
        """Requests of this process at each replica."""
        self._asked_at_s = 0.0
        router_registry.ROUTERS[self._registered_as] = self

    def seen(self) -> PoolSeen:
        """May be called from any thread."""
        # One C call copies the values, so the router's own thread can't change them midway.
        replicas = list(self.curr_replicas.values())
        queues = {replica.replica_id: self.replica_queue_len_cache.get(replica.replica_id) or 0 for replica in replicas}
        doubtful = [replica for replica in replicas if queues[replica.replica_id] > self._sent[replica.replica_id]]
        if doubtful and time.monotonic() - self._asked_at_s > ASK_S:
            self._asked_at_s = time.monotonic()
            self._event_loop.call_soon_threadsafe(self._ask, doubtful)
        return PoolSeen(len(replicas), sum(queues.values()), replicas[0].max_ongoing_requests if replicas else 0)

    def _ask(self, replicas: list[RunningReplica]) -> None:
        self._asking = self._event_loop.create_task(self._probe_queue_lens(replicas, 0))

    def on_send_request(self, replica_id: ReplicaID) -> None:
        super().on_send_request(replica_id)
        self._sent[replica_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        super().on_request_completed(replica_id, internal_request_id)
        self._sent[replica_id] -= 1
        if self._sent[replica_id] <= 0:  # replicas come and go: keep no zeros
            del self._sent[replica_id]

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [candidate_replicas[:1]]
        # Whatever is answered below: without this the base class asks again at once, in a hot loop.
        pending_request.routing_context.should_backoff = True
        try:
            free = self.select_available_replicas(candidate_replicas)
            if free:
                return [random.sample(free, min(2, len(free)))]
            self._refuse(pending_request, PoolBusyError(self._registered_as))
        except Exception as error:  # the caller gets it; raised from here it would hang the request
            self._refuse(pending_request, error)
        # Not empty: the base class looks whether the request is done only after it was given a candidate.
        return [candidate_replicas[:1]]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._refuse_all_if_empty()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._refuse_all_if_empty()

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        # The base class waits here, for ever, when there is no replica: it would never ask `choose_replicas`.
        replicas = list(self.curr_replicas.values())
        queues = [self.replica_queue_len_cache.get(replica.replica_id) for replica in replicas]
        known = [(queue, replica) for queue, replica in zip(queues, replicas, strict=True) if queue is not None]
        if len(known) == len(replicas):
            free = [(queue, replica) for queue, replica in known if queue < replica.max_ongoing_requests]
            if not free:
                raise PoolBusyError(self._registered_as)
            # Of two by chance the less busy one: gateways that all took the least busy would meet there.
            return min(random.sample(free, min(2, len(free))), key=lambda one: one[0])[1]
        return await super()._choose_replica_for_request(pending_request, is_retry=is_retry)

    def _refuse_all_if_empty(self) -> None:
        if self.curr_replicas:
            return
        for pending_request in list(self._pending_requests_by_id.values()):
            self._refuse(pending_request, PoolBusyError(self._registered_as))

    def _refuse(self, pending_request: PendingRequest, error: Exception) -> None:
        if not pending_request.future.done():
            pending_request.future.set_exception(error)
        self._remove_pending_request_from_indices(pending_request)
