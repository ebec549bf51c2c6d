"""Look, decide, write down, act: the only four things the arbiter does, in that order."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from tidegate.arbiter.book import Book, apply
from tidegate.arbiter.claim import Claim
from tidegate.arbiter.decide import Decision, Forecast, decide, forecast
from tidegate.arbiter.journal import REPLICA, Journal, is_about
from tidegate.arbiter.messages import (
    Action,
    ClaimSpec,
    GangOrders,
    GangReport,
    GatewayReport,
    HealthReport,
    JournalEntry,
    ReplicaReport,
    Seat,
    Stage,
    Verdict,
    Weights,
    When,
)
from tidegate.arbiter.moves import OPERATOR_RULE, File, Impose, Move, Pardon, Publish, Release, Roll, Unbrake
from tidegate.arbiter.owners import owners
from tidegate.arbiter.preflight import check_fits
from tidegate.arbiter.rollouts import Trial, before, next_weights, settled, told, tried
from tidegate.arbiter.seats import SILENT_S, Seats
from tidegate.arbiter.sizing import Load, LoadWatch, need
from tidegate.arbiter.states import ENDED, ClaimState
from tidegate.arbiter.view import GroupState, NodeSeen, PoolSeen, View, gpus_of, live_gateways, overflow
from tidegate.clock import Clock
from tidegate.errors import NothingToRollBackError, UnknownSubjectError
from tidegate.ids import ClaimId, GatewayId, GpuId, NodeId, PoolName, Tier
from tidegate.spec.policy import Policy
from tidegate.telemetry.goodput import Span, SpanBook

FORGET_S = 3600.0
"""After so long without a word, what claims that are over, nodes that are gone and replicas have said is forgotten."""
MISSED_BEATS = 3
"""Of a health agent: then nobody knows whether its GPUs are well, and no gang is put on them (health table, row 44)."""
STALLED_AFTER_S = 3.0
"""After so long between two of its own ticks the arbiter does not know whether others were silent or it was deaf."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSeen:
    """The part of a view that is read from the cluster; the rest comes from reports."""

    nodes: Mapping[NodeId, NodeSeen] = field(default_factory=dict)
    pools: Mapping[PoolName, PoolSeen] = field(default_factory=dict)
    strays: frozenset[PoolName] = frozenset()
    """Pools of nodes that are gone."""
    serves: bool = True
    """Serve has the application."""
    groups: Mapping[ClaimId, GroupState] = field(default_factory=dict)
    leaked: Mapping[str, ClaimId] = field(default_factory=dict)
    gangs_gone: Mapping[ClaimId, str] = field(default_factory=dict)
    """Open claims whose coordinator is dead, and how that was seen."""


class Fleet(Protocol):
    """The arbiter's eyes and hands."""

    def look(self, book: Book) -> FleetSeen: ...

    def apply(self, move: Move, book: Book) -> None:
        """Carry out one move. Idempotent: a move may come twice after a restart. Raises whatever went wrong."""


@dataclass(slots=True)
class ArbiterLoop:
    """Reports come in from any thread; `tick` runs in one."""

    fleet: Fleet
    clock: Clock
    journal: Journal
    policy: Policy
    spans: SpanBook
    book: Book = field(init=False)
    seen: FleetSeen = field(init=False, default_factory=FleetSeen)
    decision: Decision = field(init=False, default=Decision(moves=(), reason="not looked yet"))
    gateways: dict[GatewayId, GatewayReport] = field(init=False, default_factory=dict)
    health: dict[NodeId, HealthReport] = field(init=False, default_factory=dict)
    gangs: dict[ClaimId, GangReport] = field(init=False, default_factory=dict)
    replicas: dict[str, ReplicaReport] = field(init=False, default_factory=dict)
    heard_s: dict[NodeId, float] = field(init=False, default_factory=dict)
    """When each node's health agent reported last, by the arbiter's own clock (C190)."""
    _seats: Seats = field(init=False, default_factory=Seats)
    _ticked_s: float | None = field(init=False, default=None)
    _trials: dict[str, Trial] = field(init=False, default_factory=dict)
    """Who tries an application's newest weights."""
    _overflow_since_s: float | None = field(init=False, default=None)
    _watch: LoadWatch = field(init=False)
    _watched_since_s: float | None = field(init=False, default=None)
    _looked: bool = field(init=False, default=False)
    _began_s: float = field(init=False)
    _lock: threading.RLock = field(init=False, default_factory=threading.RLock)
    _noted: str = field(init=False, default="")

    def __post_init__(self) -> None:
        self.book = self.journal.book()
        self._began_s = self.clock.now_s()
        sizing = self.policy.serving.sizing
        self._watch = LoadWatch(keep_s=sizing.to_zero_after_s if sizing else 0.0)

    def tick(self, *, look: bool = True) -> Decision:
        """One round. Without a `look` the cluster is taken to be as it was last seen: what a report says of a hot GPU
        need not wait for Serve's and GCS's answers."""
        seen = self.fleet.look(self.book) if look or not self._looked else self.seen
        with self._lock:
            self.seen, self._looked = seen, True
            self._watch_overflow()
            self._watch_load()
            now_s = self.clock.now_s()
            if self._ticked_s is not None and not 0 <= now_s - self._ticked_s <= STALLED_AFTER_S:
                self.heard_s = dict.fromkeys(self.heard_s, now_s)
            self._ticked_s = now_s
            self._forget(now_s)
            view = self.view()
            self.decision = decide(self.book, view, self.policy, now_s)
            self._commit(self.decision.moves, self.decision.reason, now_s)
            self.spans.observe(owners(self.book, view), now_s)
        for move in self.decision.moves:
            self._act(move)
        return self.decision

    def view(self) -> View:
        since_s, now_s, health = self._overflow_since_s, self.clock.now_s(), self.policy.health
        heard_s = {node: at_s for node, at_s in self.heard_s.copy().items() if node in self.seen.nodes}
        return View(
            nodes=self.seen.nodes,
            pools=self.seen.pools,
            strays=self.seen.strays,
            serves=self.seen.serves,
            groups=self.seen.groups,
            leaked=self.seen.leaked,
            gateways=dict(self.gateways),
            health={node: report for node, report in self.health.items() if node in self.seen.nodes},
            gangs=dict(self.gangs),
            gangs_gone=self.seen.gangs_gone,
            replicas=dict(self.replicas),
            load=self._load(),
            silent_since_s=_silent_since_s(heard_s, now_s - health.agent_silent_after_s),
            unheard=frozenset(_silent_since_s(heard_s, now_s - MISSED_BEATS * health.period_s)),
            up_for_s=now_s - self._began_s,
            overflow_for_s=0.0 if since_s is None else now_s - since_s,
        )

    # What people and rooms ask for

    def file(self, spec: ClaimSpec) -> ClaimId:
        """File a claim; the same name asked again while it waits or is held is the same claim.

        Raises:
            ClaimNeverFitsError: see there.
        """
        with self._lock:
            # One that returns is over: its nodes are being given back.
            open_ones = (c for c in self.book.open_claims() if c.state is not ClaimState.RETURNING)
            standing = next((c for c in open_ones if c.spec.name == spec.name), None)
            if standing is not None:
                return standing.id
            if not self._looked:  # right after a restart: an unseen cluster is not an empty one
                self.seen, self._looked = self.fleet.look(self.book), True
            check_fits(self.view(), self.policy, spec)
            used = self.book.filed.get(spec.name, 0)
            claim = ClaimId(spec.name if used == 0 else f"{spec.name}.{used + 1}")
            now_s = self.clock.now_s()
            cost = forecast(self.book, self.view(), self.policy, spec, now_s).spill_usd_per_hour
            self._commit((File(claim=claim, spec=spec, at_s=now_s, spill_usd_per_hour=cost),), "filed", now_s)
            return claim

    def claim(self, claim: ClaimId) -> Claim:
        """Raises UnknownSubjectError."""
        if claim not in self.book.claims:
            raise UnknownSubjectError(claim, tuple(c.id for c in self.book.open_claims()))
        return self.book.claims[claim]

    def report_gateway(self, report: GatewayReport) -> None:
        before = self.gateways.get(report.gateway)
        if before is None or report.at_s >= before.at_s:  # a late one would take back what was spent since
            self.gateways[report.gateway] = report
            self._watch_overflow()

    def report_health(self, report: HealthReport) -> dict[GpuId, Seat]:
        self.health[report.node] = report
        self.heard_s[report.node] = self.clock.now_s()
        return self.seats_at(report)

    def report_gang(self, report: GangReport) -> GangOrders:
        before = self.gangs.get(report.claim)
        self.gangs[report.claim] = report
        self._seats.tell(before, report)
        if before is None or (before.phase, before.gang_generation) != (report.phase, report.gang_generation):
            self.note(
                JournalEntry(
                    at_s=report.at_s,
                    kind="gang",
                    subjects=(report.claim, *report.gpus),
                    reason=f"{report.phase}: generation {report.gang_generation}, {report.world_size} ranks"
                    + (f"; {report.reason}" if report.reason else ""),
                )
            )
        return _orders(report.claim, self.book.claims.get(report.claim))

    def seats_at(self, report: HealthReport) -> dict[GpuId, Seat]:
        """The node's GPUs on which gangs compute now, and how those do as a whole."""
        now_s = self.clock.now_s()
        return self._seats.at(
            [gpu.uuid for gpu in report.gpus],
            self.gangs,
            # A copy: a tick, in its own thread, may forget some.
            lambda: [self.health[node] for node, at_s in self.heard_s.copy().items() if now_s - at_s <= SILENT_S],
            now_s,
        )

    def forecast(self, spec: ClaimSpec) -> Forecast:
        """What would become of this claim; raises as `file` does."""
        with self._lock:
            check_fits(self.view(), self.policy, spec)
            return forecast(self.book, self.view(), self.policy, spec, self.clock.now_s())

    def release(self, claim: ClaimId, reason: str) -> None:
        """Its owner, or a person, lets go of a claim.

        Raises:
            UnknownSubjectError: there is no such open claim.
        """
        with self._lock:
            found = self.book.claims.get(claim)
            if found is None:
                raise UnknownSubjectError(claim, tuple(c.id for c in self.book.open_claims()))
            if found.state not in ENDED and found.released is None:
                self._commit((Release(claim=claim, reason=reason),), reason, self.clock.now_s())

    def quarantine(self, subject: str, tier: Tier, reason: str) -> Verdict:
        """A person keeps a GPU or a node from gangs, until a person pardons it.

        Raises:
            UnknownSubjectError: see there.
        """
        with self._lock:
            node, gpu = self._find(subject)
            now_s = self.clock.now_s()
            verdict = Verdict(
                at_s=now_s,
                node=node,
                gpu=gpu,
                rule=OPERATOR_RULE,
                action=Action.EVICT_NODE if gpu is None else Action.EVICT_GPU,
                when=When.NOW,
                tier=tier,
                evidence=reason,
                ends="`tidegate pardon`",
            )
            self._commit((Impose(verdict=verdict, at_s=now_s),), reason, now_s)
            return verdict

    def pardon(self, subject: str, reason: str) -> Pardon | Unbrake:
        """A person says that a GPU or a node is well. A fault that is still there is found again at the next look.

        Naming a rule on which the fleet brake is lets it go on: what was held back is carried out.

        Raises:
            UnknownSubjectError: see there.
        """
        with self._lock:
            if any(rule == subject for _, _, rule in self.book.held_back):
                now_s = self.clock.now_s()
                release = Unbrake(rule=subject, node=None, gpu=None, reason=reason, at_s=now_s)
                self._commit((release,), reason, now_s)
                return release
            node, gpu = self._find(subject)
            move = Pardon(node=node, gpu=gpu, reason=reason)
            self._commit((move,), reason, self.clock.now_s())
        self._act(move)
        return move

    def _find(self, subject: str) -> tuple[NodeId, GpuId | None]:
        """The node or GPU that a person means by its name, its id, or the first six characters of it."""
        view = self.view()
        named: list[tuple[str, NodeId, GpuId | None]] = []
        for node in view.nodes.values():
            named += [(node.name, node.id, None), (node.id, node.id, None)]
            named += [(gpu.uuid, node.id, gpu.uuid) for gpu in gpus_of(view, node)]
        found = {(node, gpu) for name, node, gpu in named if is_about(name, subject)}
        if len(found) != 1:
            raise UnknownSubjectError(subject, tuple(sorted({name for name, _, _ in named})))
        return found.pop()

    def publish(self, app: str, uri: str) -> Weights:
        with self._lock:
            weights = next_weights(self.book.weights.get(app), uri)
            self._commit((Publish(app=app, weights=weights),), "published", self.clock.now_s())
            return weights

    def roll_back(self, app: str) -> Weights:
        """Have the replicas serve what served before the newest weights; what they serve then.

        Raises:
            NothingToRollBackError: none were published, or they are back already.
        """
        with self._lock:
            weights = self.book.weights.get(app)
            if weights is None or weights.stage is Stage.BACK:
                raise NothingToRollBackError(app)
            self._roll(app, weights, Stage.BACK, "a person took them back")
            return before(weights)

    def _roll(self, app: str, weights: Weights, stage: Stage, why: str) -> None:
        self._commit((Roll(app=app, version=weights.version, stage=stage, reason=why),), why, self.clock.now_s())

    def report_replica(self, app: str, report: ReplicaReport) -> Weights | None:
        before = self.replicas.get(report.replica)
        self.replicas[report.replica] = report
        if before is None or (before.serving_version, before.refused) != (report.serving_version, report.refused):
            said = f"serves version {report.serving_version}" if not report.refused else report.refused
            subjects = (app, report.replica, *((report.pool,) if report.pool else ()))
            self.note(JournalEntry(at_s=report.at_s, kind=REPLICA, subjects=subjects, reason=said))
        with self._lock:
            weights = self.book.weights.get(app)
            if weights is not None and weights.stage is Stage.CANARY:
                trial = tried(weights, self._trials.get(app), report, self.replicas, self.clock.now_s())
                self._trials[app] = trial
                end = settled(weights, trial, report)
                if end is not None:
                    self._roll(app, weights, *end)
            return told(self.book.weights.get(app), self._trials.get(app), report.replica)

    def note(self, entry: JournalEntry) -> None:
        with self._lock:
            self.journal.note(entry)

    def current_spans(self) -> tuple[Span, ...]:
        return self.spans.current()

    def _commit(self, moves: tuple[Move, ...], why: str, now_s: float) -> None:
        book = self.book
        for move in moves:
            book = apply(book, move)
        if moves:
            self.journal.write(moves, why, now_s)
            self.journal.keep(book)
        self.book = book

    def _act(self, move: Move) -> None:
        try:
            self.fleet.apply(move, self.book)
        except Exception as error:
            # The next look shows that it did not happen, and decide asks for it again; say it once.
            said = f"{move.kind}: {type(error).__name__}: {error}"
            log.warning("a move failed: %s", said)
            if said != self._noted:
                self._noted = said
                self.note(JournalEntry(at_s=self.clock.now_s(), kind="failed_move", reason=said))

    def _forget(self, now_s: float) -> None:
        """An arbiter lives for months, and nodes and replicas never come back under the same name."""
        open_ones = {claim.id for claim in self.book.open_claims()}
        for claim, report in tuple(self.gangs.items()):
            if claim not in open_ones and now_s - report.at_s > FORGET_S:
                del self.gangs[claim]
                self._seats.forget(report)
        for node, heard_s in tuple(self.heard_s.items()):
            if node not in self.seen.nodes and now_s - heard_s > FORGET_S:
                del self.heard_s[node]
                self.health.pop(node, None)
        for name, replica in tuple(self.replicas.items()):
            if now_s - replica.at_s > FORGET_S:
                del self.replicas[name]

    def _watch_load(self) -> None:
        """While no gateway reports nothing is known, and the load is not taken for gone."""
        sizing, now_s = self.policy.serving.sizing, self.clock.now_s()
        gateways = live_gateways(self.gateways, now_s, self.policy.arbiter.gateway_silent_after_s)
        if sizing is None or not gateways:
            self._watched_since_s = None
            return
        if self._watched_since_s is None:
            self._watched_since_s = now_s
        running = sum(pool.running for pool in self.seen.pools.values())
        self._watch.observe(now_s, need(gateways, running, sizing.utilisation))

    def _load(self) -> Load | None:
        sizing, now_s, since_s = self.policy.serving.sizing, self.clock.now_s(), self._watched_since_s
        if sizing is None:
            return None
        return Load(
            highest=self._watch.highest(now_s, sizing.down_after_s),
            highest_to_zero=self._watch.highest(now_s, sizing.to_zero_after_s),
            watched_s=0.0 if since_s is None else now_s - since_s,
        )

    def _watch_overflow(self) -> None:
        """Overflow lasts for as long as every look at the gateways shows some."""
        now_s = self.clock.now_s()
        gateways = live_gateways(self.gateways, now_s, self.policy.arbiter.gateway_silent_after_s)
        if not any(overflow(gateway) for gateway in gateways):
            self._overflow_since_s = None
        elif self._overflow_since_s is None:
            self._overflow_since_s = now_s


def _silent_since_s(heard_s: Mapping[NodeId, float], before_s: float) -> dict[NodeId, float]:
    """Nodes that were heard last before then, and when. Empty where that is all of them: then it is the arbiter that
    does not hear."""
    silent = {node: at_s for node, at_s in heard_s.items() if at_s < before_s}
    return silent if len(silent) < len(heard_s) else {}


def _orders(name: ClaimId, claim: Claim | None) -> GangOrders:
    if claim is None:
        return GangOrders(grant=None, leave=f"there is no claim {name}")
    if claim.state is ClaimState.PREEMPTED:
        return GangOrders(grant=claim.grant, leave=claim.reason, leave_by_s=claim.leave_by_s)
    if claim.state is ClaimState.RETURNING or claim.state in ENDED:
        return GangOrders(grant=None, leave=f"the claim is {claim.state}: {claim.reason}")
    return GangOrders(grant=claim.grant)
