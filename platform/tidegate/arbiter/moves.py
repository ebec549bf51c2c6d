"""What the arbiter may do: every change is one of these, written into the journal before it is carried out. Pure.

A move carries everything that it changes, so that the journal's moves, replayed in order, give the book again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, assert_never

from tidegate.arbiter.messages import ClaimSpec, Grant, OverBudget, PoolPlan, Spillway, Verdict, Weights
from tidegate.arbiter.states import ClaimState
from tidegate.ids import ClaimId, GatewayId, GpuId, NodeId, PoolName

Hold: TypeAlias = tuple[NodeId, GpuId | None, str]
"""Node, GPU (None = the node), rule."""

OPERATOR_RULE = "operator"
"""The rule of a quarantine that a person imposed; only a person lifts it."""


def hold_of(verdict: Verdict) -> Hold:
    return verdict.node, verdict.gpu, verdict.rule


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """Somebody filed a claim."""

    kind: Literal["file"] = "file"
    claim: ClaimId
    spec: ClaimSpec
    at_s: float
    spill_usd_per_hour: float | None = None
    """What its overflow will cost; None = no provider works now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Its owner, or a person, lets go of a claim."""

    kind: Literal["release"] = "release"
    claim: ClaimId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Advance:
    """A claim changes its state, or only its reason."""

    kind: Literal["advance"] = "advance"
    claim: ClaimId
    to: ClaimState
    reason: str
    at_s: float
    nodes: tuple[NodeId, ...] | None = None
    """Where its gang forms (again); None = nothing changes about that."""
    leave_by_s: float | None = None
    """Into preempted: when its GPUs are taken, saved or not."""


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
    claim: ClaimId | None = None
    """For which it drains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayPools:
    """Build the pools that lack, anew those of an older plan, and take away those of nodes that are gone."""

    kind: Literal["lay_pools"] = "lay_pools"
    plan: PoolPlan | None
    """None only where none are to be left."""
    targets: Mapping[NodeId, int]
    """All nodes that are to have one, and how many replicas each has to begin with."""
    pools: tuple[PoolName, ...]
    """Those that change."""
    reason: str
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Nodes are freed for a gang that runs on meanwhile: it forms again with them after its next checkpoint."""

    kind: Literal["join"] = "join"
    claim: ClaimId
    nodes: tuple[NodeId, ...]
    """All of them; none = it is called off."""
    freed: bool = False
    """Their GPUs are free now."""
    reason: str
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StopReplicas:
    """The drain's time is over: what a pool still does is cut off, and the gateways have it answered elsewhere."""

    kind: Literal["stop_replicas"] = "stop_replicas"
    claim: ClaimId
    pools: tuple[PoolName, ...]
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
    group: str | None = None
    """Its name; None = the claim's newest."""


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
    """Tell a gang that a GPU, or (with `gpu` None) a node, must leave it."""

    kind: Literal["evict"] = "evict"
    claim: ClaimId
    node: NodeId
    gpu: GpuId | None
    reason: str
    reading_at_s: float
    at_s: float
    save_by_s: float | None = None
    """The node goes then: the gang saves first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Brake:
    """A verdict is not carried out: its rule has taken out too many nodes lately."""

    kind: Literal["brake"] = "brake"
    verdict: Verdict
    reason: str
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Unbrake:
    """A finding that was held back has ended; or, with `node` None, a person lets the rule go on."""

    kind: Literal["unbrake"] = "unbrake"
    rule: str
    node: NodeId | None
    gpu: GpuId | None
    reason: str
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Spend:
    """Count what gateways have paid to providers."""

    kind: Literal["spend"] = "spend"
    totals_usd: Mapping[GatewayId, float]
    reason: str
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Shed:
    """New orders for the gateways: refuse overflow instead of buying it, or (None) buy it again."""

    kind: Literal["shed"] = "shed"
    over_budget: OverBudget | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish:
    kind: Literal["publish"] = "publish"
    app: str
    weights: Weights


Move: TypeAlias = (
    File
    | Release
    | Advance
    | Probe
    | Route
    | SetTarget
    | LayPools
    | StopReplicas
    | Join
    | CreateGroup
    | RemoveGroup
    | Give
    | Impose
    | Lift
    | Pardon
    | Evict
    | Brake
    | Unbrake
    | Spend
    | Shed
    | Publish
)


def subjects(move: Move) -> tuple[str, ...]:
    """The claims, nodes, GPUs and pools that a move speaks of: what `tidegate why` searches."""
    match move:
        case File() | Release() | Probe() | Give():
            return (move.claim,)
        case RemoveGroup():
            return (move.claim, *((move.group,) if move.group else ()))
        case Advance():
            return (move.claim, *(move.nodes or ()))
        case CreateGroup() | Join():
            return (move.claim, *move.nodes)
        case LayPools():
            return move.pools
        case StopReplicas():
            return (move.claim, *move.pools)
        case Route():
            return (*((move.claim,) if move.claim else ()), *move.allowances, "spillway")
        case SetTarget():
            return (move.pool, *((move.claim,) if move.claim else ()))
        case Impose() | Brake():
            verdict = move.verdict
            return (verdict.node, *((verdict.gpu,) if verdict.gpu else ()), verdict.rule)
        case Unbrake():
            return (*((move.node,) if move.node else ()), *((move.gpu,) if move.gpu else ()), move.rule)
        case Spend():
            return (*move.totals_usd, "purse")
        case Shed():
            return ("purse", "spillway")
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
        case Release() | Advance() | Route() | SetTarget() | LayPools() | StopReplicas() | Join():
            return move.reason
        case Lift() | Pardon() | Evict() | Brake() | Unbrake() | Spend():
            return move.reason
        case Shed():
            return f"overflow is refused: {move.over_budget.reason}" if move.over_budget else "overflow is bought again"
        case Impose():
            return move.verdict.evidence
        case File():
            asked = f"{move.spec.owner} asks for {move.spec.min_gpus} to {move.spec.max_gpus} GPUs"
            usd = move.spill_usd_per_hour
            cost = "what no one knows: no provider works" if usd is None else f"${usd:.2f} an hour"
            return f"{asked}; its overflow will cost {cost}"
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
