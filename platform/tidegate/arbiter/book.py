"""What the arbiter has decided so far, and the moves that change it.

`Book` is rebuilt by replaying the journal's moves in order, so a move carries everything that it changes. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal, TypeAlias, assert_never

from tidegate.arbiter.messages import ClaimSpec, Grant, Orders, Spillway, Verdict, Weights
from tidegate.ids import ClaimId, Generation, GpuId, NodeId, PoolName

NO_GENERATION = Generation(0)


class ClaimState(StrEnum):
    QUEUED = "queued"
    PROVING = "proving"
    DRAINING = "draining"
    GRANTED = "granted"
    RUNNING = "running"
    RETURNING = "returning"
    DONE = "done"
    UNDONE = "undone"


NEXT: Mapping[ClaimState, frozenset[ClaimState]] = {
    ClaimState.QUEUED: frozenset({ClaimState.PROVING, ClaimState.DRAINING, ClaimState.UNDONE}),
    ClaimState.PROVING: frozenset({ClaimState.DRAINING, ClaimState.QUEUED, ClaimState.UNDONE}),
    ClaimState.DRAINING: frozenset({ClaimState.GRANTED, ClaimState.UNDONE}),
    ClaimState.GRANTED: frozenset({ClaimState.RUNNING, ClaimState.RETURNING, ClaimState.UNDONE}),
    ClaimState.RUNNING: frozenset({ClaimState.RETURNING}),
    ClaimState.RETURNING: frozenset({ClaimState.DONE}),
    ClaimState.DONE: frozenset(),
    ClaimState.UNDONE: frozenset(),
}
"""Every edge a claim may take. Undone is reached only by a claim that never ran."""

HOLDING = frozenset({ClaimState.DRAINING, ClaimState.GRANTED, ClaimState.RUNNING})
"""States in which a claim's nodes are closed to everybody else."""

ENDED = frozenset({ClaimState.DONE, ClaimState.UNDONE})


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
    canary: str | None = None
    """The newest canary sent for this claim."""
    canary_at_s: float = 0.0
    orders_generation: Generation = NO_GENERATION
    """The orders that gateways must follow before replicas may be stopped for this claim."""
    grant: Grant | None = None
    evicted_at_s: Mapping[str, float] = field(default_factory=dict)
    """GPUs (or whole nodes) that the gang was told to leave, and when last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantine:
    """A GPU (or, with `gpu` None, a node) kept from gangs, by one rule. Several rules may hold the same GPU."""

    verdict: Verdict
    since_s: float


Hold: TypeAlias = tuple[NodeId, GpuId | None, str]
"""Node, GPU (None = the node), rule."""

OPERATOR_RULE = "operator"
"""The rule of a quarantine that a person imposed; only a person lifts it."""


def hold_of(verdict: Verdict) -> Hold:
    return verdict.node, verdict.gpu, verdict.rule


FIRST_ORDERS = Orders(generation=NO_GENERATION, spillway=Spillway.CLOSED, allowances={})


@dataclass(frozen=True, slots=True, kw_only=True)
class Book:
    claims: Mapping[ClaimId, Claim] = field(default_factory=dict)
    orders: Orders = FIRST_ORDERS
    targets: Mapping[PoolName, int] = field(default_factory=dict)
    raised_at_s: float = 0.0
    """When a pool's target was raised last."""
    quarantines: Mapping[Hold, Quarantine] = field(default_factory=dict)
    weights: Mapping[str, Weights] = field(default_factory=dict)
    generation: Generation = NO_GENERATION
    """Of the newest order of any kind."""

    def open_claims(self) -> tuple[Claim, ...]:
        return tuple(claim for claim in self.claims.values() if claim.state not in ENDED)

    def holder_of(self, node: NodeId) -> Claim | None:
        return next((c for c in self.claims.values() if c.state in HOLDING and node in c.nodes), None)


# --- moves ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """Somebody filed a claim."""

    kind: Literal["file"] = "file"
    claim: ClaimId
    spec: ClaimSpec
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Advance:
    """A claim changes its state, or only its reason."""

    kind: Literal["advance"] = "advance"
    claim: ClaimId
    to: ClaimState
    reason: str
    at_s: float
    nodes: tuple[NodeId, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Ask the gateways for canaries on behalf of a claim."""

    kind: Literal["probe"] = "probe"
    claim: ClaimId
    canary: str
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """New orders for the gateways."""

    kind: Literal["route"] = "route"
    spillway: Spillway
    allowances: Mapping[PoolName, int]
    reason: str
    claim: ClaimId | None = None
    """The claim that waits until these orders are followed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetTarget:
    kind: Literal["set_target"] = "set_target"
    pool: PoolName
    replicas: int
    reason: str
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateGroup:
    """Reserve the claim's nodes: a detached placement group, one bundle a node."""

    kind: Literal["create_group"] = "create_group"
    claim: ClaimId
    nodes: tuple[NodeId, ...]
    gpus_per_node: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveGroup:
    kind: Literal["remove_group"] = "remove_group"
    claim: ClaimId


@dataclass(frozen=True, slots=True, kw_only=True)
class Give:
    """The grant's content, once its placement group is ready."""

    kind: Literal["give"] = "give"
    claim: ClaimId
    grant: Grant


@dataclass(frozen=True, slots=True, kw_only=True)
class Impose:
    """Quarantine a GPU or a node."""

    kind: Literal["impose"] = "impose"
    verdict: Verdict
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Lift:
    kind: Literal["lift"] = "lift"
    node: NodeId
    gpu: GpuId | None
    rule: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pardon:
    """A person says that a GPU or a node is well: every quarantine on it ends, and its agent forgets."""

    kind: Literal["pardon"] = "pardon"
    node: NodeId
    gpu: GpuId | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evict:
    """Tell a gang that a GPU must leave it."""

    kind: Literal["evict"] = "evict"
    claim: ClaimId
    node: NodeId
    gpu: GpuId | None
    reason: str
    reading_at_s: float
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish:
    kind: Literal["publish"] = "publish"
    app: str
    weights: Weights


Move: TypeAlias = (
    File
    | Advance
    | Probe
    | Route
    | SetTarget
    | CreateGroup
    | RemoveGroup
    | Give
    | Impose
    | Lift
    | Pardon
    | Evict
    | Publish
)


class IllegalMoveError(ValueError):
    """A move that the state table does not allow: a bug in `decide`, or a journal from another version."""


def apply(book: Book, move: Move) -> Book:
    """The book after one move.

    Raises:
        IllegalMoveError: the move takes a claim along an edge that `NEXT` does not have.
    """
    match move:
        case File():
            claim = Claim(id=move.claim, spec=move.spec, filed_at_s=move.at_s, since_s=move.at_s)
            return replace(book, claims={**book.claims, claim.id: claim})
        case Advance():
            return _with_claim(book, _advanced(book.claims[move.claim], move))
        case Probe():
            orders = replace(book.orders, generation=_next(book), canary=move.canary)
            claim = replace(book.claims[move.claim], canary=move.canary, canary_at_s=move.at_s)
            return _with_claim(replace(book, orders=orders, generation=orders.generation), claim)
        case Route():
            orders = Orders(
                generation=_next(book),
                spillway=move.spillway,
                allowances=dict(move.allowances),
                canary=book.orders.canary,
            )
            book = replace(book, orders=orders, generation=orders.generation)
            if move.claim is None:
                return book
            return _with_claim(book, replace(book.claims[move.claim], orders_generation=orders.generation))
        case SetTarget():
            raised = move.replicas > book.targets.get(move.pool, 0)
            return replace(
                book,
                targets={**book.targets, move.pool: move.replicas},
                raised_at_s=move.at_s if raised else book.raised_at_s,
                generation=_next(book),
            )
        case Give():
            return replace(
                _with_claim(book, replace(book.claims[move.claim], grant=move.grant)), generation=move.grant.generation
            )
        case Impose():
            hold = hold_of(move.verdict)
            held = book.quarantines.get(hold)
            since_s = held.since_s if held else move.at_s
            return replace(
                book, quarantines={**book.quarantines, hold: Quarantine(verdict=move.verdict, since_s=since_s)}
            )
        case Lift():
            lifted = (move.node, move.gpu, move.rule)
            return replace(book, quarantines={hold: q for hold, q in book.quarantines.items() if hold != lifted})
        case Pardon():
            subject = (move.node, move.gpu)
            return replace(book, quarantines={hold: q for hold, q in book.quarantines.items() if hold[:2] != subject})
        case Publish():
            return replace(book, weights={**book.weights, move.app: move.weights})
        case Evict():
            claim = book.claims[move.claim]
            told = {**claim.evicted_at_s, move.gpu or move.node: move.at_s}
            return _with_claim(book, replace(claim, evicted_at_s=told))
        case CreateGroup() | RemoveGroup():
            return book  # these act on the cluster only; the view shows what came of them
        case _:
            assert_never(move)


def replay(moves: Iterable[Move]) -> Book:
    """The book that a journal leads to."""
    book = Book()
    for move in moves:
        book = apply(book, move)
    return book


def subjects(move: Move) -> tuple[str, ...]:
    """The claims, nodes, GPUs and pools that a move speaks of: what `tidegate why` searches."""
    match move:
        case File() | Probe() | Give() | RemoveGroup():
            return (move.claim,)
        case Advance():
            return (move.claim, *(move.nodes or ()))
        case CreateGroup():
            return (move.claim, *move.nodes)
        case Route():
            return (*((move.claim,) if move.claim else ()), *move.allowances, "spillway")
        case SetTarget():
            return (move.pool,)
        case Impose():
            verdict = move.verdict
            return (verdict.node, *((verdict.gpu,) if verdict.gpu else ()))
        case Lift() | Pardon():
            return (move.node, *((move.gpu,) if move.gpu else ()))
        case Evict():
            return (move.claim, move.node, *((move.gpu,) if move.gpu else ()))
        case Publish():
            return (move.app,)
        case _:
            assert_never(move)


def reason(move: Move) -> str:
    """The sentence that explains a move."""
    match move:
        case Advance() | Route() | SetTarget() | Lift() | Pardon() | Evict():
            return move.reason
        case Impose():
            return move.verdict.evidence
        case File():
            return f"{move.spec.owner} asks for {move.spec.min_gpus} to {move.spec.max_gpus} GPUs"
        case Probe():
            return "a way out must be proven before serving gives up its GPUs"
        case CreateGroup():
            return f"reserve {len(move.nodes)} nodes × {move.gpus_per_node} GPUs"
        case RemoveGroup():
            return "the reservation ends"
        case Give():
            return f"the placement group is ready: {sum(len(n.gpus) for n in move.grant.nodes)} GPUs"
        case Publish():
            return f"weights version {move.weights.version}: {move.weights.uri}"
        case _:
            assert_never(move)


def _next(book: Book) -> Generation:
    return Generation(book.generation + 1)


def _with_claim(book: Book, claim: Claim) -> Book:
    return replace(book, claims={**book.claims, claim.id: claim})


def _advanced(claim: Claim, move: Advance) -> Claim:
    nodes = claim.nodes if move.nodes is None else move.nodes
    if move.to is claim.state:
        return replace(claim, reason=move.reason, nodes=nodes)
    if move.to not in NEXT[claim.state]:
        raise IllegalMoveError(f"claim {claim.id} cannot go from {claim.state} to {move.to}")
    return replace(claim, state=move.to, since_s=move.at_s, reason=move.reason, nodes=nodes)
