"""The arbiter as a Ray actor: one thread that ticks, and mailboxes that any room may call."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import ray
from ray.util.metrics import Counter, Gauge

from tidegate.arbiter import purse
from tidegate.arbiter.client import ACTOR_NAME, NAMESPACE, ON_HEAD
from tidegate.arbiter.decide import Forecast
from tidegate.arbiter.journal import JOURNAL, FileJournal
from tidegate.arbiter.loop import ArbiterLoop
from tidegate.arbiter.messages import (
    ClaimSpec,
    GangOrders,
    GangReport,
    GatewayReport,
    Grant,
    HealthReport,
    JournalEntry,
    Orders,
    ReplicaReport,
    Seat,
    Verdict,
    Weights,
)
from tidegate.arbiter.moves import Impose
from tidegate.arbiter.on_ray import RayFleet
from tidegate.arbiter.states import ENDED, ClaimState
from tidegate.arbiter.status import status_of
from tidegate.clock import SystemClock
from tidegate.errors import ClaimUndoneError
from tidegate.ids import ClaimId, GpuId, Tier
from tidegate.spec.policy import Policy
from tidegate.telemetry.goodput import SPANS, Owner, SpanBook

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.02
"""How often it is looked whether there is what a caller waits for: new orders, a grant."""


class Arbiter:
    """See `tidegate.arbiter.client.ArbiterClient` for what each call means."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        state = policy.arbiter.state_path
        state.mkdir(parents=True, exist_ok=True)
        self._loop = ArbiterLoop(
            fleet=RayFleet(app=policy.serving.app),
            clock=SystemClock(),
            journal=FileJournal(state / JOURNAL),
            policy=policy,
            spans=SpanBook(state / SPANS),
        )
        self._gauges = _Gauges()
        self._wake = threading.Event()
        self._verdicts_changed = threading.Event()
        threading.Thread(target=self._run, name="arbiter-loop", daemon=True).start()

    async def exchange(self, report: GatewayReport, wait_s: float) -> Orders:
        before = self._loop.gateways.get(report.gateway)
        self._loop.report_gateway(report)
        if before is None or (before.acked, before.canaries) != (report.acked, report.canaries):
            self._wake.set()
        await _come(lambda: self._loop.book.orders.generation != report.acked, wait_s)
        return self._loop.book.orders

    async def report_health(self, report: HealthReport) -> dict[GpuId, Seat]:
        before = self._loop.health.get(report.node)
        answer = self._loop.report_health(report)
        if before is None or _asked(before) != _asked(report):
            self._verdicts_changed.set()
            self._wake.set()
        return answer

    async def report_gang(self, report: GangReport) -> GangOrders:
        orders = self._loop.report_gang(report)
        self._wake.set()
        return orders

    async def report_replica(self, app: str, report: ReplicaReport) -> Weights | None:
        return self._loop.report_replica(app, report)

    async def note(self, entry: JournalEntry) -> None:
        await asyncio.to_thread(self._loop.note, entry)

    async def claim(self, spec: ClaimSpec) -> ClaimId:
        claim = self._loop.file(spec)
        self._wake.set()
        return claim

    async def grant(self, claim: ClaimId, wait_s: float) -> Grant | None:
        def granted() -> bool:
            found = self._loop.claim(claim)
            if found.state in (ClaimState.RETURNING, *ENDED):  # nothing will ever come
                raise ClaimUndoneError(claim, found.reason)
            return found.grant is not None

        await _come(granted, wait_s)
        return self._loop.claim(claim).grant

    async def release(self, claim: ClaimId, reason: str) -> None:
        self._loop.release(claim, reason)
        self._wake.set()

    async def forecast(self, spec: ClaimSpec) -> Forecast:
        return self._loop.forecast(spec)

    async def quarantine(self, subject: str, tier: Tier, reason: str) -> Verdict:
        verdict = self._loop.quarantine(subject, tier, reason)
        self._wake.set()
        return verdict

    async def pardon(self, subject: str, reason: str) -> None:
        await asyncio.to_thread(self._loop.pardon, subject, reason)

    async def policy(self) -> Policy:
        return self._policy

    async def roll_back(self, app: str) -> Weights:
        return self._loop.roll_back(app)

    async def publish(self, app: str, uri: str) -> Weights:
        return self._loop.publish(app, uri)

    async def why(self, subject: str) -> tuple[JournalEntry, ...]:
        return await asyncio.to_thread(self._loop.journal.about, subject)

    async def status(self) -> dict[str, Any]:
        """All that `tidegate status` shows, as plain values."""
        loop = self._loop
        return status_of(loop.book, loop.view(), self._policy, loop.decision.reason, SystemClock().now_s())

    def _run(self) -> None:
        while True:
            self._wake.wait(self._policy.arbiter.tick_s)
            self._wake.clear()
            try:
                if self._verdicts_changed.is_set():
                    self._verdicts_changed.clear()
                    self._tick(look=False)
                self._tick(look=True)
            except Exception:
                # One look that fails (GCS away for a moment) must not end the loop; the next one decides afresh.
                log.exception("a tick failed")
                self._wake.wait(1.0)

    def _tick(self, *, look: bool) -> None:
        self._loop.tick(look=look)
        self._gauges.show(self._loop)


def _asked(report: HealthReport) -> list[tuple[object, ...]]:
    """What a report asks for; its evidence changes with each reading."""
    return [(verdict.rule, verdict.gpu, verdict.action, verdict.when) for verdict in report.verdicts]


async def _come(condition: Callable[[], bool], wait_s: float) -> None:
    """Return when it holds, or after `wait_s`."""
    deadline_s = asyncio.get_running_loop().time() + wait_s
    while not condition() and asyncio.get_running_loop().time() < deadline_s:
        await asyncio.sleep(LOOK_EVERY_S)


class _Gauges:
    """The arbiter's metrics; Ray exports them with the prefix `ray_`."""

    def __init__(self) -> None:
        self._gpus = Gauge("tidegate_gpus", "GPUs by owner", tag_keys=("owner",))
        self._spillway = Gauge("tidegate_spillway_open", "1 while overflow goes out at once")
        self._claims = Gauge("tidegate_claims", "Open claims by state", tag_keys=("state",))
        self._spent = Gauge("tidegate_spill_spent_usd", "Paid to providers in this hour or day", tag_keys=("period",))
        self._evictions = Counter(
            "health_evictions_total", "GPUs and nodes taken out of gangs, by rule", tag_keys=("rule",)
        )
        self._held_back = Gauge("tidegate_findings_held_back", "Verdicts that the fleet brake keeps back")

    def show(self, loop: ArbiterLoop) -> None:
        for span in loop.current_spans():
            for owner in Owner:
                self._gpus.set(sum(1 for held in span.owners.values() if held is owner), {"owner": str(owner)})
        self._spillway.set(1.0 if loop.book.orders.spillway == "open" else 0.0)
        spent = purse.spent(loop.book.purse, loop.gateways, loop.clock.now_s())
        self._spent.set(spent.hour_usd, {"period": "hour"})
        self._spent.set(spent.day_usd, {"period": "day"})
        self._held_back.set(len(loop.book.held_back))
        for move in loop.decision.moves:
            if isinstance(move, Impose):  # each decision is shown once
                self._evictions.inc(1.0, {"rule": move.verdict.rule})
        for state in ClaimState:
            if state not in ENDED:
                count = sum(1 for claim in loop.book.claims.values() if claim.state is state)
                self._claims.set(count, {"state": str(state)})


def start_arbiter(policy: Policy) -> Any:
    """Start the arbiter on the head, or find the one that runs; idempotent.

    Detached and restarted for ever: it outlives whoever started it, and comes back with a restarted head.
    """
    return (
        ray.remote(Arbiter)
        .options(
            name=ACTOR_NAME,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            max_task_retries=0,
            num_cpus=0,
            max_concurrency=1000,
            resources=ON_HEAD,
        )
        .remote(policy)
    )
