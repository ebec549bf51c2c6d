"""One claim as the book has it, and what each move makes of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from tidegate.arbiter.messages import ClaimSpec, Grant
from tidegate.arbiter.moves import Advance, Join
from tidegate.arbiter.states import HOLDING, NEXT, ClaimState
from tidegate.ids import ClaimId, Generation, NodeId

NO_GENERATION = Generation(0)
GROUP_PREFIX = "tidegate-"


class IllegalMoveError(ValueError):
    """A move that the state table does not allow: a bug in `decide`, or a journal from another version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    id: ClaimId
    spec: ClaimSpec
    filed_at_s: float
    state: ClaimState = ClaimState.QUEUED
    since_s: float
    """When it entered its state."""
    reason: str = "filed"
    nodes: tuple[NodeId, ...] = ()
    """Chosen when draining begins."""
    attempt: int = 0
    """How often it was placed: each placement has a group of its own (`group_name`)."""
    turn_at_s: float | None = None
    """When it began to be placed; None while it waits, or has its grant. Its deadline counts from here."""
    canary: str | None = None
    """The newest canary sent for this claim."""
    canary_at_s: float = 0.0
    orders_generation: Generation = NO_GENERATION
    """The orders that gateways must follow before replicas may be stopped for this claim."""
    drains_since_s: float | None = None
    """When a pool's target was first lowered for what it takes now."""
    stopped_at_s: float | None = None
    """When replicas that drained for too long were cut off last."""
    released: str | None = None
    """Why its owner, or a person, has let go of it."""
    grant: Grant | None = None
    ever_ran: bool = False
    runs_since_s: float | None = None
    """Since when its gang works, but for forming again; None while it has no grant."""
    leave_by_s: float | None = None
    """Preempted: when its GPUs are taken."""
    joining: tuple[NodeId, ...] = ()
    """Nodes that are freed for it while its gang runs on; closed to everybody else."""
    freed_at_s: float | None = None
    """When those were free: it forms again with them after a checkpoint that is newer."""
    evicted_at_s: Mapping[str, float] = field(default_factory=dict)
    """GPUs (or whole nodes) that the gang was told to leave, and when last."""
    spill_usd_per_hour: float | None = None
    """What its overflow was expected to cost when it was filed; None = no provider worked."""

    @property
    def held(self) -> tuple[NodeId, ...]:
        """The nodes that are closed to others for it."""
        return (*self.nodes, *self.joining) if self.state in HOLDING else ()


Claims: TypeAlias = Mapping[ClaimId, Claim]


def group_name(claim: Claim) -> str:
    """Name of the detached placement group of the claim's present attempt."""
    return f"{GROUP_PREFIX}{claim.id}-{claim.attempt}"


def advanced(claim: Claim, move: Advance) -> Claim:
    """The claim in its new state; with the same state and no nodes only the reason is new.

    Raises:
        IllegalMoveError: `NEXT` has no such edge.
    """
    if move.to is claim.state and move.nodes is None:
        return replace(claim, reason=move.reason)
    if move.to not in NEXT[claim.state]:
        raise IllegalMoveError(f"claim {claim.id} cannot go from {claim.state} to {move.to}")
    nodes = claim.nodes if move.nodes is None else move.nodes
    there = replace(claim, state=move.to, since_s=move.at_s, reason=move.reason, nodes=nodes)
    match move.to:
        case ClaimState.QUEUED:
            return replace(
                _without_joining(there),
                nodes=(),
                grant=None,
                turn_at_s=None,
                runs_since_s=None,
                leave_by_s=None,
                evicted_at_s={},
            )
        case ClaimState.PROVING:
            return replace(there, turn_at_s=move.at_s)
        case ClaimState.DRAINING:
            return replace(
                _without_joining(there),
                attempt=claim.attempt + 1,
                grant=None,
                turn_at_s=move.at_s if claim.turn_at_s is None else claim.turn_at_s,
                drains_since_s=None,
                stopped_at_s=None,
                evicted_at_s={},
            )
        case ClaimState.GRANTED:
            return replace(there, turn_at_s=None)
        case ClaimState.RUNNING:
            since_s = move.at_s if claim.runs_since_s is None else claim.runs_since_s
            return replace(there, ever_ran=True, runs_since_s=since_s)
        case ClaimState.PREEMPTED:
            return replace(_without_joining(there), leave_by_s=move.leave_by_s)
        case ClaimState.RETURNING:
            return replace(_without_joining(there), nodes=(*nodes, *claim.joining))
        case ClaimState.DONE | ClaimState.UNDONE:
            return there


def joined(claim: Claim, move: Join) -> Claim:
    """The claim with the nodes that are freed for it."""
    if move.freed:
        return replace(claim, joining=move.nodes, freed_at_s=move.at_s)
    return replace(_without_joining(claim), joining=move.nodes)


def _without_joining(claim: Claim) -> Claim:
    return replace(claim, joining=(), freed_at_s=None, drains_since_s=None, stopped_at_s=None)
