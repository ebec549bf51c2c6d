"""One look at everything: the book, the view, the policy and the time, and what the rules of claims ask of them. Pure.

Built anew for each decision. What takes a pass over many things is computed once, when first asked for.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

from tidegate.arbiter import pools, purse
from tidegate.arbiter.book import Book
from tidegate.arbiter.claim import Claim, group_name
from tidegate.arbiter.messages import GangPhase, GangReport, GatewayReport, OverBudget
from tidegate.arbiter.moves import Advance, CreateGroup, Move, RemoveGroup
from tidegate.arbiter.states import ClaimState
from tidegate.arbiter.view import GroupState, PoolSeen, View, live_gateways
from tidegate.ids import ClaimId, NodeId, PoolName, pool_name
from tidegate.spec.policy import Policy

Moves = tuple[tuple[Move, ...], str]
"""What to do, and the sentence that explains it."""

NOTHING: Moves = ((), "")


@dataclass(frozen=True, kw_only=True)  # no slots: see above
class Situation:
    book: Book
    view: View
    policy: Policy
    now_s: float

    @cached_property
    def gateways(self) -> tuple[GatewayReport, ...]:
        """Those that report."""
        return live_gateways(self.view.gateways, self.now_s, self.policy.arbiter.gateway_silent_after_s)

    @cached_property
    def way_out(self) -> bool:
        """Whether some provider takes overflow now, as far as the gateways know."""
        return any(seen.state != "suspect" for gateway in self.gateways for seen in gateway.providers)

    @cached_property
    def busy_replicas(self) -> float | None:
        """Replicas that requests kept busy over the last minute; None: no gateway reports, or requests overflow."""
        if not self.gateways or self.view.overflow_for_s > 0:
            return None
        at_work = sum(pool.ongoing for gateway in self.gateways for pool in gateway.pools)
        return max(sum(gateway.local_busy_replicas for gateway in self.gateways), float(at_work))

    @cached_property
    def over_budget(self) -> OverBudget | None:
        """Which budget for overflow is spent, if one is."""
        spent = purse.spent(self.book.purse, self.view.gateways, self.now_s)
        return purse.over_budget(spent, self.policy.purse, self.now_s)

    @cached_property
    def may_spill(self) -> bool:
        """Whether serving may give up GPUs without a canary: for a gang that stands still there is no time for one."""
        if self.over_budget is not None and self.policy.purse.over_budget == "wait":
            return False
        return self.way_out or not self.policy.serving.protect

    @cached_property
    def open_claims(self) -> tuple[Claim, ...]:
        """In the order of their turns: class, then order, then time."""
        return tuple(
            sorted(
                self.book.open_claims(),
                key=lambda claim: (self.rank(claim), -claim.spec.order, claim.filed_at_s, claim.id),
            )
        )

    @cached_property
    def pools_astray(self) -> tuple[PoolSeen, ...]:
        """Those that are not as the book has them."""
        return pools.astray(self.view, self.book)

    def rank(self, claim: Claim) -> int:
        """0 = the strongest class. One that the policy does not know any more is the weakest."""
        classes = self.policy.claims.classes
        return classes.index(claim.spec.claim_class) if claim.spec.claim_class in classes else len(classes)

    def is_above_serving(self, claim: Claim) -> bool:
        return self.rank(claim) < self.policy.claims.classes.index("serving")

    def gang(self, claim: Claim) -> GangReport | None:
        return self.view.gangs.get(claim.id)

    def group(self, claim: Claim) -> GroupState:
        return self.view.groups.get(claim.id, GroupState.ABSENT)

    def over(self, claim: Claim) -> str | None:
        """Why the claim ends: its owner let go, or its gang has ended."""
        let_go = claim.released or self.view.gangs_gone.get(claim.id)
        if let_go is not None:
            return let_go
        gang = self.gang(claim)
        if gang is not None and gang.phase in (GangPhase.FINISHED, GangPhase.FAILED):
            return gang.reason or str(gang.phase)
        return None

    def deadline_s(self, claim: Claim) -> float:
        return claim.spec.deadline_s or self.policy.claims.deadline_s

    def is_late(self, claim: Claim) -> bool:
        """Whether its turn has lasted longer than its deadline."""
        return claim.turn_at_s is not None and self.now_s - claim.turn_at_s > self.deadline_s(claim)

    def pools_on(self, nodes: Collection[NodeId]) -> tuple[PoolName, ...]:
        """The pools that are deployed on these nodes."""
        return tuple(name for name in map(pool_name, nodes) if name in self.view.pools)

    def replicas_on(self, nodes: Collection[NodeId]) -> int:
        return sum(self.view.pools[name].holding for name in self.pools_on(nodes))


def advance(
    s: Situation,
    claim: Claim,
    to: ClaimState,
    reason: str,
    *,
    nodes: tuple[NodeId, ...] | None = None,
    leave_by_s: float | None = None,
) -> tuple[tuple[Advance], str]:
    move = Advance(claim=claim.id, to=to, reason=reason, at_s=s.now_s, nodes=nodes, leave_by_s=leave_by_s)
    return (move,), f"{claim.spec.name}: {to}: {reason}"


def let_go(s: Situation, claim: Claim, to: ClaimState, reason: str) -> Moves:
    """Into a state without GPUs; its reservation goes too."""
    moves, said = advance(s, claim, to, reason)
    return (*moves, unreserve(claim)), said


def reserve(s: Situation, claim: Claim, nodes: tuple[NodeId, ...]) -> CreateGroup:
    return CreateGroup(claim=claim.id, nodes=nodes, gpus_per_node=s.view.nodes[nodes[0]].gpu_slots)


def unreserve(claim: Claim) -> RemoveGroup:
    return RemoveGroup(claim=claim.id, group=group_name(claim))


def note(s: Situation, claim: Claim, reason: str) -> Moves:
    """Say why a claim waits, once: the same sentence is not written again."""
    return NOTHING if claim.reason == reason else advance(s, claim, claim.state, reason)


def named(claims: Collection[Claim]) -> str:
    return ", ".join(claim.spec.name for claim in claims)


def ids(claims: Collection[Claim]) -> frozenset[ClaimId]:
    return frozenset(claim.id for claim in claims)
