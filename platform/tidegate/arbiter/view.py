"""What the arbiter sees in one look: every fact that `decide` needs, and nothing that acts. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from tidegate.arbiter.book import Book, Quarantine
from tidegate.arbiter.messages import Action, GangReport, GatewayReport, GpuSeen, HealthReport, ReplicaReport
from tidegate.arbiter.sizing import Load
from tidegate.ids import ClaimId, GatewayId, GpuId, NodeId, PoolName, Tier

DOMAIN_LABEL = "tidegate/domain"
"""Node label that names the network domain (rail, rack, NVLink switch)."""


class GroupState(StrEnum):
    ABSENT = "absent"
    PENDING = "pending"
    READY = "ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSeen:
    """A live Ray node that declares GPUs."""

    id: NodeId
    address: str
    gpu_slots: int
    """Logical GPUs that Ray counts there."""
    free_gpu_slots: float
    labels: Mapping[str, str] = field(default_factory=dict)
    name: str = ""
    drains_by_s: float | None = None
    """When it goes, where Ray drains it (spot notice, maintenance); infinity if that is not known; None = it stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSeen:
    """One Serve deployment of the application, as the Serve controller reports it."""

    name: PoolName
    target: int
    running: int
    starting: int
    stopping: int
    plan: str = ""
    """The version of the plan that it was built by."""

    @property
    def holding(self) -> int:
        """Replicas that may hold a GPU now."""
        return self.running + self.starting + self.stopping


@dataclass(frozen=True, kw_only=True)  # no slots: what follows from it is computed once, when first asked for
class View:
    nodes: Mapping[NodeId, NodeSeen]
    pools: Mapping[PoolName, PoolSeen]
    groups: Mapping[ClaimId, GroupState]
    """Of each claim's present attempt; one that is not named is absent."""
    gateways: Mapping[GatewayId, GatewayReport]
    health: Mapping[NodeId, HealthReport]
    gangs: Mapping[ClaimId, GangReport]
    gangs_gone: Mapping[ClaimId, str] = field(default_factory=dict)
    """Claims whose coordinator is dead, and how that was seen."""
    replicas: Mapping[str, ReplicaReport] = field(default_factory=dict)
    serves: bool = True
    """The application is deployed: its pools may be built."""
    strays: frozenset[PoolName] = frozenset()
    """Pools of nodes that are gone."""
    leaked: Mapping[str, ClaimId] = field(default_factory=dict)
    """Placement groups of ours that are no claim's present one, and whose they were."""
    silent_since_s: Mapping[NodeId, float] = field(default_factory=dict)
    """Nodes whose health agents have been silent for longer than the policy allows: when they were last heard."""
    unheard: frozenset[NodeId] = frozenset()
    """Nodes whose agents have missed a few beats: nothing is known against them, nor for them."""
    up_for_s: float = math.inf
    """Since when this arbiter hears reports: one that has just come back has not heard all."""
    load: Load | None = None
    """None: replicas don't go by load."""
    overflow_for_s: float = 0.0
    """For how long, without a pause, requests have waited or gone to providers."""

    @cached_property
    def leaving(self) -> tuple[NodeId, ...]:
        """The nodes that Ray drains."""
        return tuple([node.id for node in self.nodes.values() if node.drains_by_s is not None])

    @cached_property
    def telling(self) -> Mapping[NodeId, HealthReport]:
        """The reports that say something: a verdict, or fewer GPUs than the largest node has. A node that is not named
        has as many GPUs as Ray counts, and no verdict stands."""
        most = max([node.gpu_slots for node in self.nodes.values()], default=0)
        reports = self.health.items()
        return {node: report for node, report in reports if report.verdicts or len(report.gpus) < most}


def gpus_of(view: View, node: NodeSeen) -> tuple[GpuSeen, ...]:
    """The node's GPUs: its agent's inventory, or, where no NVML answers, as many nameless ones as Ray counts."""
    report = view.health.get(node.id)
    if report is not None and report.gpus:
        return report.gpus[: node.gpu_slots] if node.gpu_slots < len(report.gpus) else report.gpus
    return tuple(GpuSeen(uuid=GpuId(f"{node.id[:12]}-{index}"), index=index) for index in range(node.gpu_slots))


def standing_on(book: Book, node: NodeId, gpu: GpuId) -> tuple[Quarantine, ...]:
    """The quarantines that hold a GPU: its own and its node's."""
    return tuple(q for q in book.quarantined.get(node, ()) if q.verdict.gpu in (gpu, None))


def is_out(book: Book, node: NodeId) -> bool:
    """Whether a verdict takes the whole node from gangs, though it may name one GPU."""
    return any(q.verdict.action is Action.EVICT_NODE for q in book.quarantined.get(node, ()))


def tier_of(book: Book, node: NodeId, gpu: GpuId) -> Tier:
    """What a GPU is good enough for: the worst that any quarantine on it says."""
    whole, each = _tiers(book, node)
    return _worse(whole, each.get(gpu, Tier.GANG))


def fit_gpus(view: View, book: Book, node: NodeSeen, *tiers: Tier) -> tuple[GpuId, ...]:
    """The node's GPUs whose tier is one of `tiers`, in NVML's order."""
    whole, each = _tiers(book, node.id)
    usual, fit = whole in tiers, {gpu: _worse(whole, tier) in tiers for gpu, tier in each.items()}
    return tuple([gpu.uuid for gpu in gpus_of(view, node) if fit.get(gpu.uuid, usual)])


def _tiers(book: Book, node: NodeId) -> tuple[Tier, Mapping[GpuId, Tier]]:
    """What the node as a whole is good enough for, and those of its GPUs of which something else was found."""
    whole = Tier.GANG
    each: dict[GpuId, Tier] = {}
    for quarantine in book.quarantined.get(node, ()):
        verdict = quarantine.verdict
        if verdict.gpu is None:
            whole = _worse(whole, verdict.tier)
        else:
            each[verdict.gpu] = _worse(each.get(verdict.gpu, Tier.GANG), verdict.tier)
        if verdict.action is Action.EVICT_NODE:
            whole = _worse(whole, Tier.SERVE)
    return whole, each


def _worse(one: Tier, other: Tier) -> Tier:
    if Tier.NONE in (one, other):
        return Tier.NONE
    return Tier.SERVE if Tier.SERVE in (one, other) else Tier.GANG


def count_fit(view: View, book: Book, node: NodeSeen, *tiers: Tier) -> int:
    """How many `fit_gpus` has. Of a node against which nothing stands that is known without looking at its GPUs."""
    if node.id in book.quarantined:
        return len(fit_gpus(view, book, node, *tiers))
    if Tier.GANG not in tiers:
        return 0
    report = view.telling.get(node.id)
    return min(node.gpu_slots, len(report.gpus)) if report is not None and report.gpus else node.gpu_slots


def live_gateways(
    gateways: Mapping[GatewayId, GatewayReport], now_s: float, silent_after_s: float
) -> tuple[GatewayReport, ...]:
    """Those that have reported lately."""
    return tuple(gateway for gateway in gateways.values() if now_s - gateway.at_s <= silent_after_s)


def overflow(gateway: GatewayReport) -> int:
    """Requests that wait for a replica now, or are with a provider."""
    return gateway.waiting + sum(provider.ongoing for provider in gateway.providers)
