"""Who holds which GPU: the only place that chooses. Pure.

`decide` looks at the book (what was decided), the view (what is there) and the time, and answers with moves and the
sentence that explains them. It may be called at any moment, also after a restart: every rule reads the present, none
remembers a step in progress. The states of a claim stand in `states.py`, each one's next step in `claims.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.arbiter import pools, purse
from tidegate.arbiter.book import Book
from tidegate.arbiter.claim import Claim
from tidegate.arbiter.claims import claim_moves, find, queued
from tidegate.arbiter.messages import ClaimSpec, Spillway
from tidegate.arbiter.moves import Advance, Move, Route, Shed, Spend
from tidegate.arbiter.moves import reason as why
from tidegate.arbiter.quarantines import quarantine_moves
from tidegate.arbiter.situation import NOTHING, Moves, Situation
from tidegate.arbiter.states import HOLDING, WAITING, ClaimState
from tidegate.arbiter.view import View
from tidegate.ids import ClaimId, NodeId
from tidegate.spec.policy import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    moves: tuple[Move, ...]
    reason: str


def decide(book: Book, view: View, policy: Policy, now_s: float) -> Decision:
    """What changes now, and why.

    Health goes first (it narrows what may be granted), then money, then claims, then pools, then routes.
    """
    s = Situation(book=book, view=view, policy=policy, now_s=now_s)
    for rule in (_quarantines, _purse, claim_moves, _pools, _routes):
        moves, reason = rule(s)
        if moves:
            # One rule a tick: the next one decides on what this one has changed.
            return Decision(moves=moves, reason=reason)
    return Decision(moves=(), reason=_standing(book))


def _quarantines(s: Situation) -> Moves:
    return quarantine_moves(s.book, s.view, s.policy.health.fleet_brake, s.now_s)


def _purse(s: Situation) -> Moves:
    moves: list[Move] = []
    totals = purse.totals_to_count(s.book.purse, s.view.gateways, s.policy.purse, s.now_s)
    if totals:
        new_usd = sum(purse.uncounted(s.book.purse, s.view.gateways).values())
        moves.append(Spend(totals_usd=totals, reason=f"${new_usd:.4f} paid to providers", at_s=s.now_s))
    over = s.over_budget if s.policy.purse.over_budget == "shed" else None
    if over != s.book.orders.over_budget:
        moves.append(Shed(over_budget=over))
    return tuple(moves), over.reason if over is not None else "the purse is counted"


def _pools(s: Situation) -> Moves:
    laid = pools.layings(s.view, s.book, s.gateways, s.now_s)
    # What is being built can't be set: the next look shows it.
    moves: tuple[Move, ...] = laid or (
        *pools.reassertions(s.book, s.pools_astray, s.now_s),
        *pools.lowerings(s.view, s.book, s.policy.serving, s.now_s),
        *pools.raises(s.view, s.book, s.pools_astray, s.policy.serving, s.now_s),
    )
    return moves, "; ".join(dict.fromkeys(map(why, moves)))


def _routes(s: Situation) -> Moves:
    """Allowances follow the targets; the spillway closes when everybody is home, and not before."""
    orders, there = s.book.orders, s.view.pools
    allowances = {**{pool.name: pool.target for pool in s.pools_astray}, **s.book.targets, **s.book.held_pools}
    if len(allowances) > len(there):  # the book remembers pools that are gone
        allowances = {name: count for name, count in allowances.items() if name in there}
    spillway = orders.spillway
    if spillway is Spillway.OPEN and not any(_needs_spillway(s, claim) for claim in s.book.claims.values()):
        spillway = Spillway.CLOSED if pools.all_home(s.view, s.book, s.policy.serving) else spillway
    if spillway is orders.spillway and allowances == orders.allowances:
        return NOTHING
    reason = "targets changed" if spillway is orders.spillway else "all replicas are home: the spillway closes"
    allowances = {name: allowances[name] for name in there}  # in the pools' order, as the journal names them
    return (Route(spillway=spillway, allowances=allowances, reason=reason),), reason


def _needs_spillway(s: Situation, claim: Claim) -> bool:
    """What a class below serving holds was idle; it leaves before anything has to overflow for long."""
    return claim.state is ClaimState.RETURNING or (claim.state in HOLDING and s.is_above_serving(claim))


def _standing(book: Book) -> str:
    waiting = [f"{c.spec.name}: {c.reason}" for c in book.open_claims() if c.state is not ClaimState.RUNNING]
    return "; ".join(waiting) or "nothing to change"


# --- before a claim is filed -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What would become of a claim if it were filed now."""

    reason: str
    nodes: tuple[NodeId, ...]
    """Those it would get; empty where it would wait."""
    gpus: int
    replicas_leaving: int
    spill_usd_per_hour: float | None
    """What its overflow will cost, at the present rate and prices; None = no provider works. For a claim that would
    wait: as if it took its GPUs from serving now."""
    claims_leaving: tuple[ClaimId, ...] = ()
    """Weaker claims that would be asked to leave."""


def forecast(book: Book, view: View, policy: Policy, spec: ClaimSpec, now_s: float) -> Forecast:
    """The decision on a hypothetical claim; nothing is filed."""
    s = Situation(book=book, view=view, policy=policy, now_s=now_s)
    claim = Claim(id=ClaimId(f"{spec.name} (dry run)"), spec=spec, filed_at_s=now_s, since_s=now_s, reason="")
    mine = (s.rank(claim), -spec.order)
    waiting = [c for c in s.open_claims if c.state in WAITING and (s.rank(c), -c.spec.order) <= mine]
    (first, *_), reason = queued(s, claim, waiting)
    waits = isinstance(first, Advance) and first.to in (ClaimState.QUEUED, ClaimState.UNDONE)
    found = None if waits else find(s, claim)
    if found is None:
        cost = _spill_cost(s, spec.max_gpus)
        return Forecast(reason=reason, nodes=(), gpus=0, replicas_leaving=0, spill_usd_per_hour=cost)
    placement, claims_leaving = found
    leaving = s.replicas_on(placement.nodes)
    return Forecast(
        reason=reason,
        nodes=placement.nodes,
        gpus=min(placement.gpus, spec.max_gpus),
        replicas_leaving=leaving,
        spill_usd_per_hour=_spill_cost(s, leaving),
        claims_leaving=tuple(c.id for c in claims_leaving),
    )


def _spill_cost(s: Situation, leaving: int) -> float | None:
    running = sum(pool.running for pool in s.view.pools.values())
    return purse.cost_per_hour_usd(s.gateways, running, leaving)
