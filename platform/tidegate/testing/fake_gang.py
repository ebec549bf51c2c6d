"""A gang in memory: it does what the arbiter's answers to its reports say, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field

from tidegate.arbiter.messages import GangOrders, GangPhase, GangReport, Grant
from tidegate.arbiter.moves import Evict
from tidegate.ids import ClaimId, Generation, NodeId


@dataclass(slots=True, kw_only=True)
class FakeGang:
    claim: ClaimId
    checkpoint_every_s: float | None = 1.0
    """None: it never saves, unless it is told to."""
    obeys: bool = True
    """Off: it does not leave when it is asked to, and hears no eviction."""
    phase: GangPhase = GangPhase.RUNNING
    stands_on: Grant | None = None
    committed_at_s: float | None = None
    step: int = 0
    told: list[Evict] = field(default_factory=list)
    """Every eviction, in the order in which they came."""
    _next: Grant | None = None
    """Other GPUs of the same nodes, from the next checkpoint on."""
    _out: set[str] = field(default_factory=set)

    @property
    def ended(self) -> bool:
        return self.phase in (GangPhase.FINISHED, GangPhase.FAILED)

    def evict(self, move: Evict) -> None:
        self.told.append(move)
        if self.obeys:
            self._out.add(move.gpu or move.node)

    def report(self, now_s: float) -> GangReport:
        self._work(now_s)
        nodes = self.stands_on.nodes if self.stands_on is not None and not self.ended else ()
        gpus = tuple(g for node in nodes if node.node not in self._out for g in node.gpus if g not in self._out)
        return GangReport(
            claim=self.claim,
            at_s=now_s,
            phase=self.phase,
            gang_generation=Generation(1),
            step=self.step,
            world_size=len(gpus),
            gpus=gpus,
            committed_step=self.step if self.committed_at_s is not None else -1,
            committed_at_s=self.committed_at_s,
            grant_generation=self.stands_on.generation if self.stands_on is not None else None,
        )

    def hear(self, orders: GangOrders, now_s: float) -> None:
        if self.ended:
            return
        if orders.leave is not None:
            if self.obeys and self.phase is not GangPhase.LEFT:
                self.committed_at_s, self.stands_on, self.phase = now_s, None, GangPhase.LEFT
        elif orders.grant is None:
            if self.stands_on is not None:
                self.stands_on, self.phase = None, GangPhase.RESTARTING
        elif self.stands_on is None or self.stands_on.placement_group != orders.grant.placement_group:
            self.stands_on, self._next, self._out, self.phase = orders.grant, None, set(), GangPhase.RUNNING
        elif orders.grant.generation > self.stands_on.generation:
            self._next = orders.grant

    def holds(self, node: NodeId) -> bool:
        return self.stands_on is not None and any(held.node == node for held in self.stands_on.nodes)

    def _work(self, now_s: float) -> None:
        if self.stands_on is None or self.phase is not GangPhase.RUNNING:
            return
        self.step += 1
        every_s, last_s = self.checkpoint_every_s, self.committed_at_s
        if every_s is not None and (last_s is None or now_s - last_s >= every_s):
            self.committed_at_s = now_s
            if self._next is not None:
                self._out -= {gpu for node in self._next.nodes for gpu in node.gpus}
                self.stands_on, self._next = self._next, None
