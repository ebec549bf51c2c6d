"""What a gang's coordinator, node agents and ranks tell each other. Plain frozen values: they cross processes. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tidegate.errors import TidegateError
from tidegate.ids import Generation, GpuId, NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A node's agent."""

    node: NodeId
    agent: str
    """Differs for each process, so that a restarted agent is told from the one before."""
    address: str
    port: int
    """Free on that node when it said so."""
    shelf_port: int = 0
    """Where it lends its node's copies of checkpoints in memory; 0: it has none."""
    domain: str | None = None
    """The node's failure domain: its label `tidegate/domain`."""
    times: Mapping[str, float] = field(default_factory=dict)
    """Where the seconds of its start went: name -> wall clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    rank: int
    local_rank: int
    node: NodeId
    gpu: GpuId


@dataclass(frozen=True, slots=True, kw_only=True)
class ShelfAt:
    """Where a node's copies of checkpoints in memory are to be had."""

    node: NodeId
    address: str
    port: int
    domain: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One generation: which GPU holds which rank."""

    generation: Generation
    master_address: str
    master_port: int
    slots: tuple[Slot, ...]
    shelves: tuple[ShelfAt, ...] = ()

    @property
    def world_size(self) -> int:
        return len(self.slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBeat:
    """What an agent reads from one rank's shared memory, and from /proc."""

    rank: int
    pid: int
    exit_code: int | None
    """None while it lives; negative = killed by that signal."""
    step: int
    """Steps done; -1 before the first."""
    first_step: int
    """The first one that this process did, and when; -1 before."""
    first_step_at_s: float
    phase: str
    idle_s: float
    """Since the rank last moved, measured on its own node."""
    progress_at_s: float
    loss: float | None
    committed_step: int
    """Newest checkpoint it knows of; -1 for none."""
    images_per_s: float | None = None
    """Of the whole run, in its newest step."""
    mfu: float | None = None
    """Share of the devices' peak; None where the peak is not known."""
    compute_s: float | None = None
    """What it computes in a step before its collectives, the median of its newest steps."""
    stopping: bool = False
    """It has been told to save and leave: by its agent, or by a SIGTERM."""
    process_state: str = ""
    """The kernel's letter for its main thread: R runs, S sleeps, D waits for a device, T is stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The coordinator's answer to a beat: what the agent holds until it hears otherwise."""

    plan: Plan | None = None
    """Ranks of this generation and of no other; None = what it holds."""
    clear: bool = False
    """It holds no rank until a plan comes."""
    stop: bool = False
    """Ranks save and leave, all at the same step."""
    stacks_of: Generation | None = None
    """That generation hung: where its ranks still stand on the last thing they did, tell it before they are killed."""
    over: bool = False
    """The gang has ended or left its nodes: the agent ends well."""
    stale: bool = False
    """Another agent speaks for the node, or the gang stands elsewhere: this one must go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacks:
    """Where the ranks of one node stood when their gang hung."""

    node: NodeId
    generation: Generation
    ranks: tuple[tuple[Slot, str], ...]
    """Each rank, and its stack as text; why there is none, where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Formation:
    """Where Ray Train may start its workers: one a bundle of this placement group."""

    group: str
    nodes: int
    gpus_per_node: int


Ask = Callable[[], Formation]
"""Blocks until the gang's current grant has a group that is ready.

Raises:
    NobodyLeadsError: there is no coordinator to ask.
"""


class NobodyLeadsError(TidegateError):
    """The gang's coordinator is gone, or the gang has ended: Ray Train must not start again."""
