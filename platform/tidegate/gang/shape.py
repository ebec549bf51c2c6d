"""What a gang is at one moment, and what follows from that alone. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby
from operator import itemgetter

from tidegate.arbiter.messages import GangPhase, Grant
from tidegate.gang.events import LeaveAsked
from tidegate.gang.plan import Member, Plan, RankBeat, Reply, Slot
from tidegate.ids import Generation, GpuId, NodeId

NO_GENERATION = Generation(0)
AGENT_SILENT_AFTER_S = 3.0
"""No generation is planned on a node whose agent has said nothing for this long."""


class Status(StrEnum):
    GATHERING = "gathering"
    """Not all node agents have joined."""
    LAUNCHING = "launching"
    """A generation is planned; its first step is not done."""
    RUNNING = "running"
    SHORT = "short"
    """Fewer fit GPUs than the least: it holds its nodes and waits for a grant with others."""
    LEFT = "left"
    """Saved and left, as asked; it goes on with its next grant."""
    FINISHED = "finished"
    FAILED = "failed"


ENDED = frozenset({Status.FINISHED, Status.FAILED})
LEADING = frozenset({Status.LAUNCHING, Status.RUNNING})
"""There is a plan that agents follow."""
NEXT: Mapping[Status, frozenset[Status]] = {
    Status.GATHERING: frozenset({Status.LAUNCHING, Status.SHORT, Status.LEFT, *ENDED}),
    Status.LAUNCHING: frozenset({Status.RUNNING, Status.GATHERING, Status.SHORT, Status.LEFT, *ENDED}),
    Status.RUNNING: frozenset({Status.LAUNCHING, Status.GATHERING, Status.SHORT, Status.LEFT, *ENDED}),
    Status.SHORT: frozenset({Status.LAUNCHING, Status.GATHERING, Status.LEFT, *ENDED}),
    Status.LEFT: frozenset({Status.GATHERING, *ENDED}),
    Status.FINISHED: frozenset(),
    Status.FAILED: frozenset(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A line for the gang's journal."""

    kind: str
    reason: str
    data: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """GPUs that leave after a save."""

    gpus: frozenset[GpuId]
    reason: str
    by_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Gang:
    grant: Grant
    """The newest that it stands on."""
    grant_stands: bool = True
    """False while the arbiter has taken its placement group away and given no other yet."""
    min_ranks: int
    max_ranks: int
    steps: int
    """Of the whole run."""
    accepts: tuple[int, ...] = ()
    """Numbers of ranks that the run's mesh can be made of, smallest first; empty: any."""
    together: tuple[int, ...] = (1,)
    """Ranks of one node come in multiples of the first of these that the node has GPUs for, most first."""
    status: Status = Status.GATHERING
    generation: Generation = NO_GENERATION
    """Of the newest plan. It only rises, over grants too."""
    train: int = 1
    """Which of Ray Train's controllers leads; the ones before must go."""
    formed_at_s: float | None = None
    """When Ray Train was told to start the workers that have not all joined yet."""
    members: Mapping[NodeId, Member] = field(default_factory=dict)
    heard_s: Mapping[NodeId, float] = field(default_factory=dict)
    evicted: frozenset[GpuId] = frozenset()
    drain: Drain | None = None
    changing: bool = False
    """The grant lists other GPUs than the plan uses: they change with the next checkpoint."""
    plan: Plan | None = None
    planned_at_s: float = 0.0
    fault_at_s: float | None = None
    """When the fault was seen that the current plan answers."""
    beats: Mapping[int, RankBeat] = field(default_factory=dict)
    """Of the current generation, by rank."""
    step: int = -1
    """Steps done by every rank of the current generation."""
    best_step: int = -1
    """The most that any generation has done."""
    committed_step: int = -1
    committed_at_s: float | None = None
    committed_at_plan: int = -1
    barren: tuple[frozenset[NodeId], ...] = ()
    """The nodes of the generations in a row that a rank's fault ended before they committed anything."""
    regroups: int = 0
    """Restarts of the worker group in a row without a commit."""
    hung_in: tuple[int, str] | None = None
    """Where the last generation hung."""
    hung_generation: Generation | None = None
    """The newest one that hung: agents that still hold it take its stacks before they end it."""
    pace: tuple[float, ...] = ()
    """Seconds of the newest steps."""
    stepped_at_s: float = 0.0
    short_since_s: float | None = None
    leave: LeaveAsked | None = None
    stop_reason: str | None = None
    reason: str = ""

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        return tuple(node.node for node in self.grant.nodes)

    @property
    def gathered(self) -> bool:
        return set(self.members) == set(self.nodes)


def phase_of(gang: Gang) -> GangPhase:
    """Where the gang's GPU-seconds go now."""
    match gang.status:
        case Status.FINISHED:
            return GangPhase.FINISHED
        case Status.FAILED:
            return GangPhase.FAILED
        case Status.LEFT:
            return GangPhase.LEFT
        case Status.GATHERING | Status.LAUNCHING | Status.SHORT:
            return GangPhase.FORMING if gang.best_step < 0 else GangPhase.RESTARTING
        case Status.RUNNING if gang.step < gang.best_step:
            return GangPhase.RECOMPUTING
        case Status.RUNNING:
            leaving = any(beat.phase in ("exporting", "done") for beat in gang.beats.values())
            return GangPhase.FINISHING if leaving else GangPhase.RUNNING


def is_member(gang: Gang, node: NodeId, agent: str) -> bool:
    """Whether this agent still speaks for its node."""
    member = gang.members.get(node)
    return member is not None and member.agent == agent


def reply_to(gang: Gang, node: NodeId, agent: str) -> Reply:
    """What an agent is to do."""
    hung = gang.hung_generation
    if gang.status in ENDED or gang.status is Status.LEFT:
        return Reply(over=True, stacks_of=hung)
    if not is_member(gang, node, agent):
        return Reply(stale=True)
    if gang.status not in LEADING:
        return Reply(clear=True, stacks_of=hung)
    return Reply(plan=gang.plan, stop=is_asked_to_save(gang), stacks_of=hung)


def slots_of(gang: Gang) -> tuple[Slot, ...]:
    """As many ranks as the run can use, node by node; the rest of the GPUs is held and left alone."""
    usable = [(node, gpu) for node in gang.nodes for gpu in _whole(gang, node)]
    most = min(len(usable), gang.max_ranks)
    if gang.accepts:
        most = max((size for size in gang.accepts if size <= most), default=0)
    slots: list[Slot] = []
    for node, here in groupby(usable[:most], key=itemgetter(0)):
        for local_rank, (_, gpu) in enumerate(here):
            slots.append(Slot(rank=len(slots), local_rank=local_rank, node=node, gpu=gpu))
    return tuple(slots)


def _whole(gang: Gang, node: NodeId) -> tuple[GpuId, ...]:
    """Fit GPUs of a node without those that no whole group is left for."""
    granted = next((len(seen.gpus) for seen in gang.grant.nodes if seen.node == node), 0)
    unit = next((unit for unit in gang.together if unit <= granted), 1)
    fit = fit_gpus(gang, node)
    return fit[: len(fit) // unit * unit]


def fit_gpus(gang: Gang, node: NodeId) -> tuple[GpuId, ...]:
    gpus = next((granted.gpus for granted in gang.grant.nodes if granted.node == node), ())
    return tuple(gpu for gpu in gpus if gpu not in gang.evicted)


def silent_nodes(gang: Gang, now_s: float) -> list[NodeId]:
    """Members whose agents have said nothing for a while."""
    heard = {node: gang.heard_s.get(node, now_s) for node in gang.nodes if node in gang.members}
    return [node for node, heard_s in heard.items() if now_s - heard_s > AGENT_SILENT_AFTER_S]


def is_asked_to_save(gang: Gang) -> bool:
    return gang.stop_reason is not None or gang.leave is not None or gang.drain is not None
