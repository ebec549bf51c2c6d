"""A gang's life as a state machine. Pure.

    gathering -> launching -> running -> finished
        ^            |  ^        |
        |            v  |        v
        +-------- (Ray Train restarts its group)          any of them -> failed

`advance(gang, event, spec, now_s)` gives the gang after the event and notes that say what happened and why. A *plan* is
one generation: which GPU holds which rank. An agent that holds another generation's ranks kills them and starts the
plan's; nothing else is ever ordered, so a lost or late message does no harm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TypeAlias, assert_never

from tidegate.arbiter.messages import GangPhase
from tidegate.ids import ClaimId, Generation, GpuId, NodeId
from tidegate.spec.policy import GangSpec


class Status(StrEnum):
    GATHERING = "gathering"
    """Not all node agents have joined."""
    LAUNCHING = "launching"
    """A generation is planned; its first step is not done."""
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"


NEXT: Mapping[Status, frozenset[Status]] = {
    Status.GATHERING: frozenset({Status.LAUNCHING, Status.FINISHED, Status.FAILED}),
    Status.LAUNCHING: frozenset({Status.RUNNING, Status.GATHERING, Status.FINISHED, Status.FAILED}),
    Status.RUNNING: frozenset({Status.LAUNCHING, Status.GATHERING, Status.FINISHED, Status.FAILED}),
    Status.FINISHED: frozenset(),
    Status.FAILED: frozenset(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A node's agent."""

    node: NodeId
    agent: str
    """Differs for each process, so that a restarted agent is told from the one before."""
    address: str
    port: int
    """Free on that node when it said so."""
    gpus: tuple[GpuId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    rank: int
    local_rank: int
    node: NodeId
    gpu: GpuId


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    generation: Generation
    master_address: str
    master_port: int
    slots: tuple[Slot, ...]

    @property
    def world_size(self) -> int:
        return len(self.slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBeat:
    """What an agent reads from one rank's shared memory."""

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


# --- events -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    member: Member


@dataclass(frozen=True, slots=True, kw_only=True)
class Beaten:
    """An agent's report."""

    node: NodeId
    agent: str
    generation: Generation
    port: int
    ranks: tuple[RankBeat, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evicted:
    node: NodeId
    gpu: GpuId | None
    """None = every GPU of the node."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAsked:
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainEnded:
    """Ray Train gave up its worker group for good."""

    error: str


Event: TypeAlias = Joined | Beaten | Evicted | StopAsked | TrainEnded


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """One line of the gang's journal."""

    kind: str
    reason: str
    data: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gang:
    claim: ClaimId
    nodes: tuple[NodeId, ...]
    """Those granted, in the placement group's order."""
    min_ranks: int
    max_ranks: int
    status: Status = Status.GATHERING
    members: Mapping[NodeId, Member] = field(default_factory=dict)
    evicted: frozenset[GpuId] = frozenset()
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
    committed_at_plan: int = -1
    barren: int = 0
    """Generations in a row that a rank's death ended before they committed anything."""
    step_s: float = 0.0
    """Seconds a step takes: a moving mean."""
    stepped_at_s: float = 0.0
    stop_reason: str | None = None
    reason: str = ""


Outcome: TypeAlias = tuple[Gang, tuple[Note, ...]]


def advance(gang: Gang, event: Event, spec: GangSpec, now_s: float) -> Outcome:
    """The gang after `event`. An ended gang ignores everything."""
    if gang.status in (Status.FINISHED, Status.FAILED):
        return gang, ()
    match event:
        case Joined():
            return _joined(gang, event, now_s)
        case Beaten():
            return _beaten(gang, event, spec, now_s)
        case Evicted():
            return _evicted(gang, event, now_s)
        case StopAsked():
            if gang.status is Status.GATHERING:
                return _end(gang, Status.FINISHED, event.reason)
            return replace(gang, stop_reason=event.reason), (Note(kind="stop", reason=event.reason),)
        case TrainEnded():
            return _end(gang, Status.FAILED, event.error)
        case _:
            assert_never(event)


def phase_of(gang: Gang) -> GangPhase:
    """Where the gang's GPU-seconds go now."""
    match gang.status:
        case Status.FINISHED:
            return GangPhase.FINISHED
        case Status.FAILED:
            return GangPhase.FAILED
        case Status.GATHERING | Status.LAUNCHING:
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


# --- what each event does ---------------------------------------------------------------------------------------


def _joined(gang: Gang, event: Joined, now_s: float) -> Outcome:
    member = event.member
    notes = [Note(kind="joined", reason=f"agent of {member.node[:12]} with {len(member.gpus)} GPUs")]
    if member.node in gang.members:
        # A second agent for a node: Ray Train has restarted its whole group, the others will join again too.
        gang = replace(gang, members={}, status=Status.GATHERING, fault_at_s=gang.fault_at_s or now_s)
        notes.append(Note(kind="group_restarted", reason="Ray Train has restarted its worker group"))
    gang = replace(gang, members={**gang.members, member.node: member})
    if set(gang.members) != set(gang.nodes):
        return gang, tuple(notes)
    gang, more = _plan(gang, "all node agents have joined", now_s)
    return gang, (*notes, *more)


def _beaten(gang: Gang, event: Beaten, spec: GangSpec, now_s: float) -> Outcome:
    if not is_member(gang, event.node, event.agent):
        return gang, ()
    member = replace(gang.members[event.node], port=event.port)
    gang = replace(gang, members={**gang.members, event.node: member})
    plan = gang.plan
    if plan is None or event.generation != plan.generation or gang.status is Status.GATHERING:
        return gang, ()
    gang = replace(gang, beats={**gang.beats, **{beat.rank: beat for beat in event.ranks}})
    gang, notes = _progressed(gang, plan)
    dead = [beat for beat in event.ranks if beat.exit_code not in (None, 0)]
    if dead:
        slot = plan.slots[dead[0].rank]
        why = f"rank {dead[0].rank} on {slot.gpu} {_how(dead[0].exit_code)}"
        again, more = _again(gang, why, spec, now_s)
        return again, (*notes, *more)
    if len(gang.beats) == plan.world_size and all(beat.exit_code == 0 for beat in gang.beats.values()):
        ended, more = _end(gang, Status.FINISHED, gang.stop_reason or f"all {gang.step} steps are done")
        return ended, (*notes, *more)
    late = _late(gang, event.ranks, spec, now_s)
    if late is not None:
        again, more = _again(gang, late, spec, now_s)
        return again, (*notes, *more)
    return gang, notes


def _evicted(gang: Gang, event: Evicted, now_s: float) -> Outcome:
    member = gang.members.get(event.node)
    leaving = frozenset({event.gpu}) if event.gpu is not None else frozenset(member.gpus if member else ())
    if leaving <= gang.evicted:
        return gang, ()
    gang = replace(gang, evicted=gang.evicted | leaving)
    note = Note(
        kind="evicted", reason=event.reason, data={"node": event.node, "gpus": sorted(leaving), "step": gang.step}
    )
    if gang.plan is None or not any(slot.gpu in leaving for slot in gang.plan.slots):
        return gang, (note,)
    gang, more = _plan(replace(gang, fault_at_s=now_s), event.reason, now_s)
    return gang, (note, *more)


def _progressed(gang: Gang, plan: Plan) -> Outcome:
    """Take over what the beats say: steps, commits, and whether this generation has made its first step."""
    committed = max([gang.committed_step, *(beat.committed_step for beat in gang.beats.values())])
    gang = replace(gang, committed_step=committed)
    if len(gang.beats) < plan.world_size:
        return gang, ()
    step = min(beat.step for beat in gang.beats.values())
    if step <= gang.step:
        return gang, ()
    at_s = max(beat.progress_at_s for beat in gang.beats.values())
    if gang.status is not Status.LAUNCHING:
        per_step_s = (at_s - gang.stepped_at_s) / (step - gang.step)
        mean_s = per_step_s if gang.step_s == 0 else 0.9 * gang.step_s + 0.1 * per_step_s
        return replace(gang, step=step, best_step=max(step, gang.best_step), step_s=mean_s, stepped_at_s=at_s), ()
    first = min(beat.first_step for beat in gang.beats.values())
    first_at_s = max(beat.first_step_at_s for beat in gang.beats.values())
    lost = max(0, gang.best_step - (first - 1)) if gang.best_step >= 0 else 0
    since_s = gang.fault_at_s if gang.fault_at_s is not None else gang.planned_at_s
    note = Note(
        kind="first_step",
        reason=f"generation {plan.generation} makes step {first} with {plan.world_size} ranks",
        data={
            "generation": plan.generation,
            "world_size": plan.world_size,
            "step": first,
            "step_at_s": first_at_s,
            "steps_lost": lost,
            "to_next_step_s": first_at_s - since_s,
        },
    )
    gang = replace(
        gang,
        status=Status.RUNNING,
        step=step,
        best_step=max(step, gang.best_step),
        stepped_at_s=at_s,
        fault_at_s=None,
    )
    return gang, (note,)


def _late(gang: Gang, ranks: tuple[RankBeat, ...], spec: GangSpec, now_s: float) -> str | None:
    """Why the generation counts as hung, or None.

    A rank in its steps may stand still for max(hang_floor_s, hang_steps × step time); start, save and export have the
    start's limit, since they move without stepping.
    """
    if gang.status is Status.LAUNCHING:
        if now_s - gang.planned_at_s > spec.start_deadline_s:
            return f"no first step within {spec.start_deadline_s:.0f} s"
        return None
    limit_s = max(spec.hang_floor_s, spec.hang_steps * gang.step_s)
    for beat in ranks:
        allowed_s = limit_s if beat.phase == "stepping" else spec.start_deadline_s
        if beat.exit_code is None and beat.idle_s > allowed_s:
            return f"rank {beat.rank} has stood still for {beat.idle_s:.1f} s in {beat.phase}"
    return None


def _again(gang: Gang, why: str, spec: GangSpec, now_s: float) -> Outcome:
    """A new generation on the same GPUs, unless they keep dying without getting anywhere."""
    barren = gang.barren + 1 if gang.committed_step == gang.committed_at_plan else 0
    if barren >= spec.no_progress_generations:
        return _end(gang, Status.FAILED, f"{barren} generations in a row ended without a new checkpoint; last: {why}")
    if gang.stop_reason is not None and gang.best_step < 0:
        return _end(gang, Status.FINISHED, gang.stop_reason)
    return _plan(replace(gang, barren=barren, fault_at_s=now_s), why, now_s)


def _plan(gang: Gang, why: str, now_s: float) -> Outcome:
    """The next generation over all members' GPUs that are not evicted."""
    slots: list[Slot] = []
    for node in gang.nodes:
        member = gang.members.get(node)
        fit = [gpu for gpu in member.gpus if gpu not in gang.evicted] if member is not None else []
        for local_rank, gpu in enumerate(fit[: gang.max_ranks - len(slots)]):
            slots.append(Slot(rank=len(slots), local_rank=local_rank, node=node, gpu=gpu))
    if len(slots) < gang.min_ranks:
        return _end(gang, Status.FAILED, f"{len(slots)} GPUs are left, at least {gang.min_ranks} are needed; {why}")
    first = gang.members[slots[0].node]
    generation = Generation(gang.plan.generation + 1 if gang.plan is not None else 1)
    plan = Plan(generation=generation, master_address=first.address, master_port=first.port, slots=tuple(slots))
    note = Note(
        kind="planned",
        reason=why,
        data={
            "generation": generation,
            "world_size": plan.world_size,
            "fault_at_s": gang.fault_at_s,
            "step": gang.step,
        },
    )
    gang = replace(
        gang,
        status=Status.LAUNCHING,
        plan=plan,
        planned_at_s=now_s,
        beats={},
        step=-1,
        committed_at_plan=gang.committed_step,
        reason=why,
    )
    return gang, (note,)


def _end(gang: Gang, status: Status, reason: str) -> Outcome:
    return replace(gang, status=status, reason=reason), (Note(kind=str(status), reason=reason),)


def _how(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"was killed by signal {-exit_code}"
    return f"ended with exit code {exit_code}"
