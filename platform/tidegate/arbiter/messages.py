"""What the rooms tell the arbiter and hear back. Plain frozen values: they cross processes and lie in the journal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from tidegate.ids import ClaimId, GatewayId, Generation, GpuId, NodeId, PoolName, ProviderName, Tier

# --- health -----------------------------------------------------------------------------------------------------


class Action(StrEnum):
    """What a verdict asks for."""

    WARN = "warn"
    EVICT_GPU = "evict_gpu"
    EVICT_NODE = "evict_node"


class When(StrEnum):
    NOW = "now"
    NEXT_CHECKPOINT = "next_checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a finding means. Level-triggered: an agent repeats it in each report for as long as it stands."""

    at_s: float
    """When the reading behind it was taken."""
    node: NodeId
    gpu: GpuId | None
    rule: str
    action: Action
    when: When
    tier: Tier
    """What the subject is still good for while this stands."""
    evidence: str
    ends: str
    """How it is lifted, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSeen:
    """One GPU as its node's agent sees it. None = not readable, which is never the same as healthy."""

    uuid: GpuId
    index: int
    temperature_celsius: float | None = None
    tensor_active_ratio: float | None = None
    memory_used_bytes: int | None = None
    processes: int | None = None
    """Compute processes that the driver lists on it."""
    run: ClaimId | None = None
    """Whose rank computes on it, as the arbiter has said last."""
    step_compute_s: float | None = None
    """What that rank computes in a step before its collectives."""
    straggler_score: float | None = None
    """Its gang's median of that, divided by its own: 1 = like its peers, lower = slower than they."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthReport:
    node: NodeId
    at_s: float
    gpus: tuple[GpuSeen, ...]
    """The inventory, in NVML's order; empty where no NVML answers."""
    verdicts: tuple[Verdict, ...] = ()
    """All that stand now."""
    source_error: str | None = None
    """Why the inventory is empty or stale, e.g. "NVML: library not found"."""
    compared: Mapping[str, Mapping[GpuId, float]] = field(default_factory=dict)
    """What is compared over all nodes of a gang: signal -> GPU that is at work -> value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Middle:
    """Of one signal over all GPUs of a gang that are at work, whatever node they are in."""

    count: int
    median: float
    mad: float
    """Median of the absolute deviations from the median."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """The rank on a GPU, and its gang: the arbiter's answer to a health report, for each GPU that computes now."""

    claim: ClaimId
    pid: int | None = None
    compute_s: float | None = None
    """What it computes in a step before its collectives."""
    middles: Mapping[str, Middle] = field(default_factory=dict)
    """By signal; without those of which too few GPUs tell."""


# --- serving ----------------------------------------------------------------------------------------------------


class Spillway(StrEnum):
    CLOSED = "closed"
    """Local replicas answer; a provider only helps before a request would fail."""
    OPEN = "open"
    """Overflow goes out at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverBudget:
    """The purse is empty: overflow is refused, not bought."""

    reason: str
    until_s: float
    """When the next hour's or day's budget begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What gateways do until they hear otherwise."""

    generation: Generation
    spillway: Spillway
    allowances: Mapping[PoolName, int]
    """How many replicas a pool may use now; a pool that is not named may use all that run."""
    canary: str | None = None
    """Send one canary request to every provider and report it under this name (once each name)."""
    over_budget: OverBudget | None = None
    """None: a provider may be paid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """How the pools of an application are built: its gateways tell, since the arbiter knows no engine."""

    builder: str
    """`module:function`; called with a node's id, its pool's name and `args`, it gives the bound Serve deployment."""
    args: Mapping[str, str | int | float]
    version: str
    """Two plans of one version build the same pools: replicas of it stay when the plan comes again."""
    at_s: float
    """When the application was built: the newest plan holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLoad:
    pool: PoolName
    replicas: int
    ongoing: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderSeen:
    name: ProviderName
    state: str
    """`closed` (local GPUs have room), `open`, or `suspect` (cooling down after a failure, or its pictures drifted)."""
    ongoing: int
    slots: int
    price_per_image_usd: float
    latency_s: float | None = None
    spent_usd: float = 0.0
    """Paid to it, by this gateway's ledger."""
    why: str = ""
    """The reason for its state, as a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryResult:
    canary: str
    provider: ProviderName
    ok: bool
    detail: str
    took_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayReport:
    gateway: GatewayId
    at_s: float
    acked: Generation
    """The generation of the orders that this gateway follows now."""
    pools: tuple[PoolLoad, ...] = ()
    providers: tuple[ProviderSeen, ...] = ()
    canaries: tuple[CanaryResult, ...] = ()
    """Of the newest canary only."""
    waiting: int = 0
    """Requests accepted and not yet sent anywhere."""
    answered_local_total: int = 0
    answered_spilled_total: int = 0
    refused_total: int = 0
    """Refused with a reason before any work (bad request, over a limit, no way to answer in time)."""
    failed_total: int = 0
    spent_usd_total: float = 0.0
    """Paid to providers, by this gateway's ledger: goes on over the gateway's own restart."""
    local_images_per_s: float = 0.0
    """Made by replicas here, over the last minute."""
    local_busy_replicas: float = 0.0
    """Replicas that these images kept busy: their GPU-seconds per second, over the last minute."""
    plan: PoolPlan | None = None
    """Of its application's pools; None = they are not the arbiter's to build."""


class Stage(StrEnum):
    """How far published weights have come: canary -> out or back; what is out may still be taken back."""

    CANARY = "canary"
    """One replica tries them."""
    OUT = "out"
    BACK = "back"
    """What served before serves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What the replicas of an application should serve."""

    version: int
    """0: what the application was deployed with."""
    uri: str
    """A folder written by `tidegate.train.export`, or such a one in an object store; nothing for version 0."""
    stage: Stage = Stage.OUT
    before_version: int = 0
    """What served before: 0 where nothing else was ever published and good."""
    before_uri: str = ""
    reason: str = ""
    """Why they are at this stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """A replica's answer to `Weights`."""

    replica: str
    at_s: float
    serving_version: int
    refused: str | None = None
    """Why the newest version was refused, if it was; the old one keeps serving."""
    refused_version: int | None = None
    pool: PoolName | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of a node's burn-in."""

    name: str
    subject: str
    """A GPU, the node, or a pair."""
    passed: bool
    text: str
    """What was found, and what it must be."""


# --- gangs ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimSpec:
    name: str
    """The run's name."""
    claim_class: str
    order: int = 0
    """Inside a class the higher goes first; equals queue by time."""
    max_gpus: int
    min_gpus: int
    """The gang goes on with as few as this when GPUs are evicted."""
    owner: str
    """Who asked, e.g. the Ray job's submission id."""
    gpus_per_node: int | None = None
    """The gang's shape: only nodes that give at least so many fit GPUs; None = whatever each node gives."""
    one_domain: bool = False
    """All nodes must lie in one network domain (node label `tidegate/domain`)."""
    deadline_s: float | None = None
    """From its turn to its grant, else the claim is undone. Overrides `claims.deadline_s`."""
    drain_deadline_s: float | None = None
    """What in-flight requests on its GPUs may still take, if that is less than `serving.drain_deadline_s`: what is not
    done by then is cut off, and answered by a provider."""
    patience_s: float | None = None
    """Undone when its turn has not come after this long in the queue; None = it waits for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantedNode:
    node: NodeId
    address: str
    gpus: tuple[GpuId, ...]
    """Those fit to train on; a quarantined GPU inside the node is held by the grant but not listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    claim: ClaimId
    generation: Generation
    placement_group: str
    """Name of the detached placement group, one bundle a node in the order of `nodes`."""
    gpus_per_node: int
    """Logical GPUs in each bundle."""
    nodes: tuple[GrantedNode, ...]


class GangPhase(StrEnum):
    """Where a gang's GPU-seconds go now."""

    FORMING = "forming"
    """Granted, the first step is not done yet."""
    RUNNING = "running"
    RESTARTING = "restarting"
    RECOMPUTING = "recomputing"
    """Steps that were done before a fault are done again."""
    FINISHING = "finishing"
    FINISHED = "finished"
    FAILED = "failed"
    LEFT = "left"
    """Saved and left as asked (preempted); it goes on with its next grant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GangOrders:
    """What a gang does until it hears otherwise: the arbiter's answer to each of its reports. Level-triggered."""

    grant: Grant | None
    """The newest; None while the claim waits, or while its placement group is made (again): hold no GPU then.
    One of a later generation than the gang's own means: with the same placement group, use exactly its GPUs from the
    next checkpoint on (a cooled one has come back, a bad one left the list); with another, form again on its nodes."""
    leave: str | None = None
    """Save, then leave the GPUs: why (a stronger claim, a person)."""
    leave_by_s: float | None = None
    """When they are taken, saved or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GangReport:
    claim: ClaimId
    at_s: float
    phase: GangPhase
    gang_generation: Generation
    step: int
    world_size: int
    gpus: tuple[GpuId, ...] = ()
    """GPUs that hold a rank now, by rank."""
    pids: tuple[int | None, ...] = ()
    """Process of each rank on its node; None while it starts."""
    compute_s: tuple[float | None, ...] = ()
    """What each rank computes in a step before its collectives; None where it has not told."""
    loss: float | None = None
    images_per_s: float | None = None
    mfu: float | None = None
    """Model FLOPs utilisation."""
    committed_step: int = -1
    """Newest step that is safe in a checkpoint; -1 for none."""
    committed_at_s: float | None = None
    """When it became so: the work that a preemption would lose is what came after."""
    grant_generation: Generation | None = None
    """Of the grant that the gang stands on."""
    reason: str | None = None
    """Of a failure, or of the newest restart."""


# --- people -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEntry:
    """One line of the journal: what was decided or seen, and why."""

    at_s: float
    kind: str
    subjects: tuple[str, ...] = ()
    """Claims, nodes, GPUs, pools that it speaks of: what `tidegate why` searches."""
    reason: str = ""
    data: Mapping[str, object] = field(default_factory=dict)
