"""A cluster in memory: nodes, pools that start and stop replicas, placement groups that wait for free GPUs.

It keeps Ray's two awkward rules: a replica takes time to start and to stop, and a replica that waits for a GPU wins a
freed one against a placement group that waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tidegate.arbiter.book import Book, CreateGroup, Evict, Move, RemoveGroup, SetTarget
from tidegate.arbiter.loop import FleetSeen
from tidegate.arbiter.view import GroupState, NodeSeen, PoolSeen
from tidegate.ids import ClaimId, NodeId, PoolName, pool_name


class CrashedError(BaseException):
    """The arbiter's process ends here: what was journaled is not acted on. Nothing that handles errors may catch it."""


@dataclass(slots=True)
class _Pool:
    node: NodeId
    target: int = 1
    waiting: int = 0
    starting: int = 0
    running: int = 0
    stopping: int = 0


@dataclass(slots=True, kw_only=True)
class FakeFleet:
    """Each `look` lets one moment pass."""

    slots: dict[NodeId, int]
    """Node -> its GPUs."""
    serves: bool = True
    """Whether an application with a pool for each node is deployed."""
    stuck: set[NodeId] = field(default_factory=set)
    """Nodes whose replicas do not stop."""
    crash_after_moves: int | None = None
    pools: dict[NodeId, _Pool] = field(init=False)
    groups: dict[ClaimId, tuple[NodeId, ...]] = field(init=False, default_factory=dict)
    ready: set[ClaimId] = field(init=False, default_factory=set)
    evicted: list[Evict] = field(init=False, default_factory=list)
    applied: list[Move] = field(init=False, default_factory=list)
    gangs_gone: dict[ClaimId, str] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.pools = {node: _Pool(node) for node in self.slots} if self.serves else {}

    def look(self, book: Book) -> FleetSeen:
        self._pass_time()
        nodes = {
            node: NodeSeen(id=node, address="10.0.0.1", gpu_slots=slots, free_gpu_slots=self._free(node), name=node)
            for node, slots in self.slots.items()
        }
        pools: dict[PoolName, PoolSeen] = {
            pool_name(node): PoolSeen(
                name=pool_name(node),
                target=pool.target,
                running=pool.running,
                starting=pool.starting + pool.waiting,
                stopping=pool.stopping,
            )
            for node, pool in self.pools.items()
        }
        groups = {claim: GroupState.READY if claim in self.ready else GroupState.PENDING for claim in self.groups}
        return FleetSeen(nodes=nodes, pools=pools, groups=groups, gangs_gone=dict(self.gangs_gone))

    def apply(self, move: Move, book: Book) -> None:
        if self.crash_after_moves is not None:
            if self.crash_after_moves <= 0:
                raise CrashedError
            self.crash_after_moves -= 1
        self.applied.append(move)
        match move:
            case SetTarget():
                pool = next(pool for pool in self.pools.values() if pool_name(pool.node) == move.pool)
                pool.target = move.replicas
            case CreateGroup():
                self.groups.setdefault(move.claim, move.nodes)
            case RemoveGroup():
                self.groups.pop(move.claim, None)
                self.ready.discard(move.claim)
            case Evict():
                self.evicted.append(move)
            case _:
                pass

    def holders(self, node: NodeId) -> int:
        """GPUs of the node that are taken, by replicas and ready placement groups."""
        return self.slots[node] - self._free(node)

    def _free(self, node: NodeId) -> int:
        pool = self.pools.get(node)
        replicas = pool.starting + pool.running + pool.stopping if pool else 0
        held = sum(self.slots[node] for claim in self.ready if node in self.groups[claim])
        return self.slots[node] - replicas - held

    def _pass_time(self) -> None:
        for pool in self.pools.values():
            pool.stopping = 0
            pool.running += pool.starting
            pool.starting = 0
            surplus = pool.running + pool.waiting - pool.target
            if surplus > 0 and pool.node not in self.stuck:
                dropped = min(surplus, pool.waiting)
                pool.waiting -= dropped
                pool.stopping = surplus - dropped
                pool.running -= pool.stopping
            elif surplus < 0:
                pool.waiting -= surplus
            # Actors first: this is the race that Ray lets a replica win.
            pool.starting = min(pool.waiting, self._free(pool.node))
            pool.waiting -= pool.starting
        for claim, nodes in self.groups.items():
            if claim not in self.ready and all(self._free(node) == self.slots[node] for node in nodes):
                self.ready.add(claim)
