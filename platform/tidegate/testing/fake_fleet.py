"""A cluster in memory: nodes, pools that start and stop replicas, placement groups that wait for free GPUs.

It keeps Ray's awkward rules: a replica takes time to start and to stop; a replica that waits for a GPU wins a freed one
against a placement group that waits for it; a group whose node dies waits for ever.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tidegate.arbiter.book import Book
from tidegate.arbiter.claim import group_name
from tidegate.arbiter.loop import FleetSeen
from tidegate.arbiter.moves import CreateGroup, Evict, LayPools, Move, RemoveGroup, SetTarget, StopReplicas
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
    held_up: int = 0
    """Of those that run: told to stop, and don't."""
    plan: str = ""


@dataclass(slots=True, kw_only=True)
class FakeFleet:
    """Each `look` lets one moment pass."""

    slots: dict[NodeId, int]
    """Node -> its GPUs."""
    serves: bool = True
    """Whether an application with a pool for each node is deployed."""
    lays: bool = False
    """Pools come and go by `LayPools` only; else each node has one while it is there."""
    stuck: set[NodeId] = field(default_factory=set)
    """Nodes whose replicas do not stop by themselves."""
    frozen: set[NodeId] = field(default_factory=set)
    """Nodes whose replicas cannot even be cut off."""
    broken: set[NodeId] = field(default_factory=set)
    """Nodes whose replicas do not get ready."""
    drains: dict[NodeId, float] = field(default_factory=dict)
    """Nodes that Ray drains, and by when."""
    labels: dict[NodeId, dict[str, str]] = field(default_factory=dict)
    crash_after_moves: int | None = None
    pools: dict[NodeId, _Pool] = field(init=False)
    groups: dict[str, tuple[NodeId, ...]] = field(init=False, default_factory=dict)
    """Placement group -> its nodes."""
    ready: set[str] = field(init=False, default_factory=set)
    strays: set[PoolName] = field(init=False, default_factory=set)
    evicted: list[Evict] = field(init=False, default_factory=list)
    applied: list[Move] = field(init=False, default_factory=list)
    gangs_gone: dict[ClaimId, str] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.pools = {node: _Pool(node) for node in self.slots} if self.serves and not self.lays else {}

    def look(self, book: Book) -> FleetSeen:
        self._pass_time()
        nodes = {
            node: NodeSeen(
                id=node,
                address="10.0.0.1",
                gpu_slots=slots,
                free_gpu_slots=self._free(node),
                labels=self.labels.get(node, {}),
                name=node,
                drains_by_s=self.drains.get(node),
            )
            for node, slots in self.slots.items()
        }
        pools: dict[PoolName, PoolSeen] = {
            pool_name(node): PoolSeen(
                name=pool_name(node),
                target=pool.target,
                running=pool.running - pool.held_up,
                starting=pool.starting + pool.waiting,
                stopping=pool.stopping + pool.held_up,
                plan=pool.plan,
            )
            for node, pool in self.pools.items()
        }
        newest = {group_name(claim): claim.id for claim in book.claims.values()}
        return FleetSeen(
            nodes=nodes,
            pools=pools,
            strays=frozenset(self.strays),
            serves=self.serves,
            groups={
                newest[name]: GroupState.READY if name in self.ready else GroupState.PENDING
                for name in self.groups
                if name in newest
            },
            leaked={name: ClaimId("") for name in self.groups if name not in newest},
            gangs_gone=dict(self.gangs_gone),
        )

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
            case LayPools():
                for node in set(self.pools).difference(move.targets):
                    del self.pools[node]
                self.strays.clear()
                for node, target in move.targets.items():
                    pool = self.pools.setdefault(node, _Pool(node))
                    pool.target, pool.plan = target, move.plan.version if move.plan else ""
            case StopReplicas():
                for pool in self.pools.values():
                    if pool_name(pool.node) in move.pools and pool.node not in self.frozen:
                        self.stuck.discard(pool.node)
            case CreateGroup():
                self.groups.setdefault(group_name(book.claims[move.claim]), move.nodes)
            case RemoveGroup():
                name = move.group or group_name(book.claims[move.claim])
                self.groups.pop(name, None)
                self.ready.discard(name)
            case Evict():
                self.evicted.append(move)
            case _:
                pass

    def lose(self, node: NodeId) -> None:
        """The node dies, with all that stood on it."""
        del self.slots[node]
        if self.pools.pop(node, None) is not None and self.lays:
            self.strays.add(pool_name(node))
        self.drains.pop(node, None)
        self.ready -= {name for name, nodes in self.groups.items() if node in nodes}

    def join(self, node: NodeId, slots: int) -> None:
        self.slots[node] = slots
        if self.serves and not self.lays:
            self.pools[node] = _Pool(node)

    def holders(self, node: NodeId) -> int:
        """GPUs of the node that are taken, by replicas and ready placement groups."""
        return self.slots[node] - self._free(node)

    def _free(self, node: NodeId) -> int:
        pool = self.pools.get(node)
        replicas = pool.starting + pool.running + pool.stopping if pool else 0
        held = sum(self.slots[node] for name in self.ready if node in self.groups[name])
        return self.slots[node] - replicas - held

    def _pass_time(self) -> None:
        for pool in self.pools.values():
            pool.stopping = pool.held_up = 0
            if pool.node in self.broken:
                pool.waiting += pool.starting
            else:
                pool.running += pool.starting
            pool.starting = 0
            surplus = pool.running + pool.waiting - pool.target
            if surplus > 0:
                dropped = min(surplus, pool.waiting)
                pool.waiting -= dropped
                stopping = surplus - dropped
                if pool.node in self.stuck | self.frozen:
                    pool.held_up = stopping
                else:
                    pool.stopping, pool.held_up = stopping, 0
                    pool.running -= stopping
            elif surplus < 0:
                pool.waiting -= surplus
            # Actors first: this is the race that Ray lets a replica win.
            pool.starting = min(pool.waiting, self._free(pool.node))
            pool.waiting -= pool.starting
        for name, nodes in self.groups.items():
            there = all(node in self.slots and node not in self.drains for node in nodes)
            if name not in self.ready and there and all(self._free(node) == self.slots[node] for node in nodes):
                self.ready.add(name)
