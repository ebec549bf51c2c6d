"""An arbiter over a fleet in memory, and the reports that rooms would send it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tidegate.arbiter.claim import Claim
from tidegate.arbiter.journal import MemoryJournal
from tidegate.arbiter.loop import ArbiterLoop
from tidegate.arbiter.messages import (
    Action,
    CanaryResult,
    ClaimSpec,
    GangPhase,
    GatewayReport,
    GpuSeen,
    HealthReport,
    ProviderSeen,
    Verdict,
    When,
)
from tidegate.arbiter.moves import Evict
from tidegate.arbiter.states import ClaimState
from tidegate.ids import ClaimId, GatewayId, Generation, GpuId, NodeId, ProviderName, Tier
from tidegate.spec.policy import Policy
from tidegate.spec.providers import ProviderSpec
from tidegate.telemetry.goodput import SpanBook
from tidegate.testing.fake_clock import FakeClock
from tidegate.testing.fake_fleet import CrashedError, FakeFleet
from tidegate.testing.fake_gang import FakeGang

NODES = tuple(NodeId(letter * 56) for letter in "abc")
WITH_PROVIDER = Policy(providers=(ProviderSpec(name="out", base_url="http://127.0.0.1:1/v1"),))


def gpu(node: NodeId, index: int) -> GpuId:
    return GpuId(f"GPU-{node[:4]}-{index}")


def ask(
    name: str = "run", *, gpus: int = 6, at_least: int = 3, claim_class: str = "pretrain", order: int = 0
) -> ClaimSpec:
    return ClaimSpec(
        name=name,
        claim_class=claim_class,
        order=order,
        max_gpus=gpus,
        min_gpus=at_least,
        owner="test",
        deadline_s=60.0,
    )


@dataclass(slots=True, kw_only=True)
class Story:
    """`tick` lets a fifth of a second pass."""

    policy: Policy = WITH_PROVIDER
    fleet: FakeFleet = field(default_factory=lambda: FakeFleet(slots=dict.fromkeys(NODES, 2)))
    clock: FakeClock = field(default_factory=FakeClock)
    journal: MemoryJournal = field(default_factory=MemoryJournal)
    provider_works: bool = True
    gateway_follows: bool = True
    gateway_says: dict[str, Any] = field(default_factory=dict)
    """What else its reports carry."""
    silent_agents: bool = False
    mute: set[NodeId] = field(default_factory=set)
    """Nodes whose agents say nothing."""
    silent_gateway: bool = False
    hot: set[GpuId] = field(default_factory=set)
    lost: set[GpuId] = field(default_factory=set)
    memory: dict[GpuId, tuple[int | None, int | None]] = field(default_factory=dict)
    """Used bytes and listed processes."""
    phases: dict[ClaimId, GangPhase] = field(default_factory=dict)
    """Gangs that report: RUNNING = as the gang itself goes on, any other phase is forced on it."""
    gangs: dict[ClaimId, FakeGang] = field(default_factory=dict)
    _heard: list[Evict] = field(default_factory=list)
    crashes: int = 0
    loop: ArbiterLoop = field(init=False)

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """A new arbiter process: only the journal and the cluster are left of the old one."""
        self.loop = ArbiterLoop(self.fleet, self.clock, self.journal, self.policy, SpanBook())

    def tick(self, times: int = 1, *, look: bool = True) -> None:
        for _ in range(times):
            self.clock.advance(0.2)
            self._report()
            try:
                self.loop.tick(look=look)
            except CrashedError:
                self.crashes += 1
                self.fleet.crash_after_moves = None
                self.restart()

    def until(self, claim: ClaimId, state: ClaimState, ticks: int = 400) -> None:
        for _ in range(ticks):
            if self.claim(claim).state is state:
                return
            self.tick()
        raise AssertionError(f"{claim} is {self.claim(claim).state}, not {state}: {self.claim(claim).reason}")

    def claim(self, claim: ClaimId) -> Claim:
        return self.loop.book.claims[claim]

    def file(self, spec: ClaimSpec) -> ClaimId:
        return self.loop.file(spec)

    def gang(self, claim: ClaimId) -> FakeGang:
        """The claim's gang; it works once `phases` names it."""
        return self.gangs.setdefault(claim, FakeGang(claim=claim))

    def train(self, claim: ClaimId) -> None:
        """Let the gang make its first step."""
        self.until(claim, ClaimState.GRANTED)
        self.phases[claim] = GangPhase.RUNNING
        self.until(claim, ClaimState.RUNNING)

    def reasons(self, kind: str) -> list[str]:
        return [entry.reason for entry in self.journal.entries if entry.kind == kind]

    def _report(self) -> None:
        now_s = self.clock.now_s()
        orders = self.loop.book.orders
        canaries = ()
        if orders.canary is not None:
            detail = "answered" if self.provider_works else "status 500"
            canaries = (
                CanaryResult(
                    canary=orders.canary,
                    provider=ProviderName("out"),
                    ok=self.provider_works,
                    detail=detail,
                    took_s=0.1,
                ),
            )
        acked = orders.generation if self.gateway_follows else Generation(0)
        state = "open" if self.provider_works else "suspect"
        provider = ProviderSeen(name=ProviderName("out"), state=state, ongoing=0, slots=8, price_per_image_usd=0.01)
        said = {"providers": (provider,), "local_busy_replicas": 6.0, **self.gateway_says}
        gateway = GatewayReport(gateway=GatewayId("g1"), at_s=now_s, acked=acked, canaries=canaries, **said)
        if not self.silent_gateway:
            self.loop.report_gateway(gateway)
        for node, slots in () if self.silent_agents else self.fleet.slots.items():
            if node not in self.mute:
                self.loop.report_health(self._health(node, slots, now_s))
        for claim, phase in self.phases.items():
            gang = self.gang(claim)
            if phase is not GangPhase.RUNNING or gang.ended:
                gang.phase = phase
            for move in self.fleet.evicted[len(self._heard) :]:
                self._heard.append(move)
                self.gang(move.claim).evict(move)
            gang.hear(self.loop.report_gang(gang.report(now_s)), now_s)

    def _health(self, node: NodeId, slots: int, now_s: float) -> HealthReport:
        verdicts = [
            verdict(node, gpu(node, index), now_s, lost=lost)
            for lost, which in ((False, self.hot), (True, self.lost))
            for index in range(slots)
            if gpu(node, index) in which
        ]
        gpus = []
        for index in range(slots):
            memory_bytes, processes = self.memory.get(gpu(node, index), (None, None))
            gpus.append(
                GpuSeen(
                    uuid=gpu(node, index),
                    index=index,
                    temperature_celsius=61.0,
                    memory_used_bytes=memory_bytes,
                    processes=processes,
                )
            )
        return HealthReport(node=node, at_s=now_s, gpus=tuple(gpus), verdicts=tuple(verdicts))


def verdict(node: NodeId, on: GpuId, now_s: float, *, lost: bool) -> Verdict:
    return Verdict(
        at_s=now_s,
        node=node,
        gpu=on,
        rule="gpu_lost" if lost else "temperature",
        action=Action.EVICT_NODE if lost else Action.EVICT_GPU,
        when=When.NOW,
        tier=Tier.NONE if lost else Tier.SERVE,
        evidence="GPU is lost" if lost else "79 °C",
        ends="reset" if lost else "70 °C or less for 600 s",
    )
