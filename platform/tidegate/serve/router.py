"""What Serve calls a request router: ours routes nothing, it tells the gateway which replicas there are.

Serve has no other way to hear at once of replicas that come and go. Requests take our own hop (`serve/hop/`).
"""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from tidegate.ids import PoolName
from tidegate.serve import replica_registry
from tidegate.serve.replica_registry import ReplicaAddress


class ReplicaWatch(RequestRouter):
    """A request that somebody sends by Serve's handle all the same goes to any replica, as Serve sees fit."""

    def initialize_state(self, pool: str) -> None:
        self._pool = PoolName(pool)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        addresses = (_address_of(replica) for replica in replicas)
        replica_registry.tell(self._pool, tuple(address for address in addresses if address is not None))

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        return [candidate_replicas]


def _address_of(replica: RunningReplica) -> ReplicaAddress | None:
    # The address is a private part of `RunningReplica` (Ray 2.60); `tests/serve/test_serve_cluster.py` covers it.
    host = replica._replica_info.node_ip
    return ReplicaAddress.of(replica.replica_id.unique_id, host, replica.max_ongoing_requests, replica.replica_metadata)
