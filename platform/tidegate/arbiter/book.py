"""What the arbiter has decided so far: rebuilt by replaying the journal's moves in order. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import assert_never

from tidegate.arbiter.claim import NO_GENERATION, Claim, advanced, joined
from tidegate.arbiter.messages import Orders, Spillway, Verdict, Weights
from tidegate.arbiter.moves import (
    Advance,
    Brake,
    CreateGroup,
    Evict,
    File,
    Give,
    Hold,
    Impose,
    Join,
    LayPools,
    Lift,
    Move,
    Pardon,
    Probe,
    Publish,
    Release,
    RemoveGroup,
    Route,
    SetTarget,
    Shed,
    Spend,
    StopReplicas,
    Unbrake,
    hold_of,
)
from tidegate.arbiter.purse import Purse, count
from tidegate.arbiter.states import ENDED, ClaimState
from tidegate.ids import ClaimId, Generation, NodeId, PoolName, pool_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantine:
    """A GPU (or, with `gpu` None, a node) kept from gangs, by one rule. Several rules may hold the same GPU."""

    verdict: Verdict
    since_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBack:
    """A verdict that the fleet brake keeps from being carried out."""

    verdict: Verdict
    since_s: float
    reason: str


IMPOSED_KEPT_S = 3600.0
"""For how long the book remembers which nodes a rule took out: the longest window of a fleet brake."""

ENDED_KEPT_S = 7 * 86_400.0
"""For how long the book remembers a claim that has ended; the journal, and so `tidegate why`, always does."""

FIRST_ORDERS = Orders(generation=NO_GENERATION, spillway=Spillway.CLOSED, allowances={})


@dataclass(frozen=True, kw_only=True)  # no slots: what follows from it is computed once, when first asked for
class Book:
    claims: Mapping[ClaimId, Claim] = field(default_factory=dict)
    filed: Mapping[str, int] = field(default_factory=dict)
    """Name -> how many claims of it there have ever been: no two have the same id."""
    orders: Orders = FIRST_ORDERS
    targets: Mapping[PoolName, int] = field(default_factory=dict)
    raised_at_s: float = 0.0
    """When a pool's target was raised last."""
    laid_at_s: float = 0.0
    """When pools were built or taken away last."""
    released_at_s: Mapping[NodeId, float] = field(default_factory=dict)
    """When a claim let a node go, last."""
    quarantines: Mapping[Hold, Quarantine] = field(default_factory=dict)
    imposed_at_s: Mapping[str, Mapping[NodeId, float]] = field(default_factory=dict)
    """Rule -> nodes that it took out lately, and when last."""
    held_back: Mapping[Hold, HeldBack] = field(default_factory=dict)
    """A rule that is named here is braked."""
    unbraked_at_s: Mapping[str, float] = field(default_factory=dict)
    """Rule -> when a person let it go on."""
    purse: Purse = field(default_factory=Purse)
    weights: Mapping[str, Weights] = field(default_factory=dict)
    generation: Generation = NO_GENERATION
    """Of the newest order of any kind."""

    def open_claims(self) -> tuple[Claim, ...]:
        return tuple(claim for claim in self.claims.values() if claim.state not in ENDED)

    @cached_property
    def holders(self) -> Mapping[NodeId, Claim]:
        """Who holds each node that is held. A preempted claim comes before its heir, which drains towards it."""
        found: dict[NodeId, Claim] = {}
        for claim in sorted(self.claims.values(), key=lambda claim: claim.state is not ClaimState.DRAINING):
            found |= dict.fromkeys(claim.held, claim)
        return found

    @cached_property
    def held_pools(self) -> Mapping[PoolName, int]:
        """The pools of the nodes that are held, and what requests may be sent there: none."""
        return dict.fromkeys(map(pool_name, self.holders), 0)

    @cached_property
    def quarantined(self) -> Mapping[NodeId, tuple[Quarantine, ...]]:
        """What stands against each node and its GPUs; nodes against which nothing stands are not named."""
        found: dict[NodeId, tuple[Quarantine, ...]] = {}
        for (node, _, _), quarantine in self.quarantines.items():
            found[node] = (*found.get(node, ()), quarantine)
        return found

    def holder_of(self, node: NodeId) -> Claim | None:
        return self.holders.get(node)


def apply(book: Book, move: Move) -> Book:
    """The book after one move.

    Raises:
        IllegalMoveError: the move takes a claim along an edge that `NEXT` does not have.
    """
    match move:
        case File():
            claim = Claim(
                id=move.claim,
                spec=move.spec,
                filed_at_s=move.at_s,
                since_s=move.at_s,
                spill_usd_per_hour=move.spill_usd_per_hour,
            )
            remembered = {
                old.id: old
                for old in book.claims.values()
                if old.state not in ENDED or move.at_s - old.since_s <= ENDED_KEPT_S
            }
            name = claim.spec.name
            return replace(
                book,
                claims={**remembered, claim.id: claim},
                filed={**book.filed, name: book.filed.get(name, 0) + 1},
            )
        case Advance():
            return _releasing(book, advanced(book.claims[move.claim], move), move.at_s)
        case Release():
            return _with_claim(book, replace(book.claims[move.claim], released=move.reason))
        case Join():
            return _releasing(book, joined(book.claims[move.claim], move), move.at_s)
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
                over_budget=book.orders.over_budget,
            )
            book = replace(book, orders=orders, generation=orders.generation)
            if move.claim is None:
                return book
            return _with_claim(book, replace(book.claims[move.claim], orders_generation=orders.generation))
        case SetTarget():
            raised = move.replicas > book.targets.get(move.pool, 0)
            if move.claim is not None and book.claims[move.claim].drains_since_s is None:
                book = _with_claim(book, replace(book.claims[move.claim], drains_since_s=move.at_s))
            return replace(
                book,
                targets={**book.targets, move.pool: move.replicas},
                raised_at_s=move.at_s if raised else book.raised_at_s,
                generation=_next(book),
            )
        case LayPools():
            targets = {pool_name(node): count for node, count in move.targets.items()}
            return replace(book, targets=targets, laid_at_s=move.at_s, generation=_next(book))
        case Give():
            return replace(
                _with_claim(book, replace(book.claims[move.claim], grant=move.grant)), generation=move.grant.generation
            )
        case Impose():
            hold = hold_of(move.verdict)
            held = book.quarantines.get(hold)
            since_s = held.since_s if held else move.at_s
            return replace(
                book,
                quarantines={**book.quarantines, hold: Quarantine(verdict=move.verdict, since_s=since_s)},
                imposed_at_s=book.imposed_at_s if held else _imposed(book, move),
                held_back={other: finding for other, finding in book.held_back.items() if other != hold},
            )
        case Lift():
            lifted = (move.node, move.gpu, move.rule)
            return replace(book, quarantines={hold: q for hold, q in book.quarantines.items() if hold != lifted})
        case Pardon():
            subject = (move.node, move.gpu)
            return replace(
                book,
                quarantines={hold: q for hold, q in book.quarantines.items() if hold[:2] != subject},
                held_back={hold: finding for hold, finding in book.held_back.items() if hold[:2] != subject},
            )
        case Brake():
            finding = HeldBack(verdict=move.verdict, since_s=move.at_s, reason=move.reason)
            return replace(book, held_back={**book.held_back, hold_of(move.verdict): finding})
        case Unbrake():
            return _unbraked(book, move)
        case Spend():
            return replace(book, purse=count(book.purse, move.totals_usd, move.at_s))
        case Shed():
            orders = replace(book.orders, generation=_next(book), over_budget=move.over_budget)
            return replace(book, orders=orders, generation=orders.generation)
        case Publish():
            return replace(book, weights={**book.weights, move.app: move.weights})
        case Evict():
            claim = book.claims[move.claim]
            told = {**claim.evicted_at_s, move.gpu or move.node: move.at_s}
            return _with_claim(book, replace(claim, evicted_at_s=told))
        case StopReplicas():
            return _with_claim(book, replace(book.claims[move.claim], stopped_at_s=move.at_s))
        case CreateGroup() | RemoveGroup():
            return book  # these act on the cluster only; the view shows what came of them
        case _:
            assert_never(move)


def replay(moves: Iterable[Move], book: Book | None = None) -> Book:
    """The book that a journal leads to, from an empty one or from `book`."""
    book = Book() if book is None else book
    for move in moves:
        book = apply(book, move)
    return book


def _next(book: Book) -> Generation:
    return Generation(book.generation + 1)


def _imposed(book: Book, move: Impose) -> Mapping[str, Mapping[NodeId, float]]:
    rule = move.verdict.rule
    lately = {
        node: at_s for node, at_s in book.imposed_at_s.get(rule, {}).items() if move.at_s - at_s <= IMPOSED_KEPT_S
    }
    return {**book.imposed_at_s, rule: {**lately, move.verdict.node: move.at_s}}


def _unbraked(book: Book, move: Unbrake) -> Book:
    if move.node is None:
        others = {hold: finding for hold, finding in book.held_back.items() if hold[2] != move.rule}
        return replace(book, held_back=others, unbraked_at_s={**book.unbraked_at_s, move.rule: move.at_s})
    ended = (move.node, move.gpu, move.rule)
    return replace(book, held_back={hold: finding for hold, finding in book.held_back.items() if hold != ended})


def _with_claim(book: Book, claim: Claim) -> Book:
    return replace(book, claims={**book.claims, claim.id: claim})


def _releasing(book: Book, claim: Claim, at_s: float) -> Book:
    """The book with the changed claim; the nodes that it lets go have changed hands now."""
    let_go = set(book.claims[claim.id].held).difference(claim.held)
    after = _with_claim(book, claim)
    if not let_go:
        return after
    return replace(after, released_at_s={**book.released_at_s, **dict.fromkeys(let_go, at_s)})
