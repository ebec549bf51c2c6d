"""What the arbiter sees in one look: every fact that `decide` needs, and nothing that acts. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from tidegate.arbiter.book import Book, Quarantine
from tidegate.arbiter.messages import GangReport, GatewayReport, GpuSeen, HealthReport, ReplicaReport
from tidegate.ids import ClaimId, GatewayId, GpuId, NodeId, PoolName, Tier


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


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSeen:
    """One Serve deployment of the application, as the Serve controller reports it."""

    name: PoolName
    target: int
    running: int
    starting: int
    stopping: int

    @property
    def holding(self) -> int:
        """Replicas that may hold a GPU now."""
        return self.running + self.starting + self.stopping


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    nodes: Mapping[NodeId, NodeSeen]
    pools: Mapping[PoolName, PoolSeen]
    groups: Mapping[ClaimId, GroupState]
    gateways: Mapping[GatewayId, GatewayReport]
    health: Mapping[NodeId, HealthReport]
    gangs: Mapping[ClaimId, GangReport]
    releases: Mapping[ClaimId, str] = field(default_factory=dict)
    """Claims whose owner has let go, and why."""
    replicas: Mapping[str, ReplicaReport] = field(default_factory=dict)


def gpus_of(view: View, node: NodeSeen) -> tuple[GpuSeen, ...]:
    """The node's GPUs: its agent's inventory, or, where no NVML answers, as many nameless ones as Ray counts."""
    report = view.health.get(node.id)
    if report is not None and report.gpus:
        return report.gpus[: node.gpu_slots] if node.gpu_slots < len(report.gpus) else report.gpus
    return tuple(GpuSeen(uuid=GpuId(f"{node.id[:12]}-{index}"), index=index) for index in range(node.gpu_slots))


def standing_on(book: Book, node: NodeId, gpu: GpuId) -> tuple[Quarantine, ...]:
    """The quarantines that hold a GPU: its own and its node's."""
    return tuple(q for (on_node, on_gpu, _), q in book.quarantines.items() if on_node == node and on_gpu in (gpu, None))


def tier_of(book: Book, node: NodeId, gpu: GpuId) -> Tier:
    """What a GPU is good enough for: the worst that any quarantine on it says."""
    tiers = {quarantine.verdict.tier for quarantine in standing_on(book, node, gpu)}
    return next((tier for tier in (Tier.NONE, Tier.SERVE) if tier in tiers), Tier.GANG)


def fit_gpus(view: View, book: Book, node: NodeSeen, *tiers: Tier) -> tuple[GpuId, ...]:
    """The node's GPUs whose tier is one of `tiers`, in NVML's order."""
    return tuple(gpu.uuid for gpu in gpus_of(view, node) if tier_of(book, node.id, gpu.uuid) in tiers)


def live_gateways(view: View, now_s: float, silent_after_s: float) -> tuple[GatewayReport, ...]:
    return tuple(g for g in view.gateways.values() if now_s - g.at_s <= silent_after_s)
