"""A gang's life as a state machine. Pure.

    gathering -> launching -> running -> finished
        ^  ^         |  ^        |
        |  |         v  |        v
        |  +---- (Ray Train starts its workers anew, or a grant elsewhere)      any of them -> failed
        |
        +-- left (saved, nodes given back; the next grant)       launching, running -> short -> launching, gathering

`advance(gang, event, spec, now_s)` gives the gang after the event and notes that say what happened and why. A *plan* is
one generation: which GPU holds which rank. An agent that holds another generation's ranks kills them and starts the
plan's; nothing else is ever ordered (`reply_to`), so a lost or late message does no harm.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias, assert_never

from tidegate.arbiter.messages import Grant
from tidegate.gang.events import (
    Beaten,
    Event,
    Evicted,
    Formed,
    Joined,
    LeaveAsked,
    Reattached,
    Regranted,
    StopAsked,
    Ticked,
    TrainEnded,
    TrainLost,
    Ungranted,
)
from tidegate.gang.hang import PACE_STEPS, find_hang
from tidegate.gang.plan import Member, Plan, RankBeat
from tidegate.gang.shape import (
    ENDED,
    LEADING,
    Drain,
    Gang,
    Note,
    Status,
    fit_gpus,
    is_asked_to_save,
    is_member,
    silent_nodes,
    slots_of,
)
from tidegate.ids import Generation
from tidegate.spec.policy import GangSpec

MOST_REGROUPS = 10
"""Restarts of Ray Train's worker group in a row without a new checkpoint after which the run stops and says so."""

Outcome: TypeAlias = tuple[Gang, tuple[Note, ...]]


def advance(gang: Gang, event: Event, spec: GangSpec, now_s: float) -> Outcome:
    """The gang after `event`. An ended gang ignores everything."""
    if gang.status in ENDED:
        return gang, ()
    match event:
        case Formed():
            return _formed(gang, now_s)
        case Joined():
            return _joined(gang, event.member, now_s)
        case Beaten():
            return _beaten(gang, event, spec, now_s)
        case Evicted():
            return _evicted(gang, event, now_s)
        case Regranted():
            return _regranted(gang, event.grant, now_s)
        case Ungranted():
            return _ungranted(gang, now_s)
        case LeaveAsked():
            return _leave_asked(gang, event)
        case StopAsked():
            return _stop_asked(gang, event.reason)
        case TrainLost():
            return _train_lost(gang, event, now_s)
        case TrainEnded():
            return _end(gang, Status.FAILED, event.error)
        case Reattached():
            heard_s = dict.fromkeys(gang.members, now_s)
            note = Note(kind="reattached", reason=f"the coordinator is back; generation {gang.generation} goes on")
            # Whoever could not join meanwhile has its time from now.
            formed_at_s = now_s if gang.formed_at_s is not None else None
            return replace(gang, heard_s=heard_s, formed_at_s=formed_at_s), (note,)
        case Ticked():
            return _ticked(gang, spec, now_s)
        case _:
            assert_never(event)


# --- what each event does ---------------------------------------------------------------------------------------


def _formed(gang: Gang, now_s: float) -> Outcome:
    again = gang.generation > 0 or gang.train > 1 or gang.formed_at_s is not None
    regroups = gang.regroups + 1 if again else 0
    if regroups > MOST_REGROUPS:
        return _end(gang, Status.FAILED, f"{regroups} restarts of Ray Train's workers without a new checkpoint")
    where = f"{len(gang.nodes)} nodes of {gang.grant.placement_group}"
    note = Note(
        kind="group_restarted" if again else "forming",
        reason=f"Ray Train starts its workers {'anew ' if again else ''}on {where}",
        data={"nodes": list(gang.nodes), "train": gang.train},
    )
    return replace(_scattered(gang, now_s), formed_at_s=now_s, regroups=regroups), (note,)


def _joined(gang: Gang, member: Member, now_s: float) -> Outcome:
    if member.node not in gang.nodes or gang.status is Status.LEFT or is_member(gang, member.node, member.agent):
        return gang, ()
    reason = f"agent of {member.node[:12]} with {len(fit_gpus(gang, member.node))} GPUs"
    note = Note(kind="joined", reason=reason, data={"node": member.node, **member.times})
    if member.node in gang.members:
        gang = _scattered(gang, now_s)
    gang = replace(
        gang,
        members={**gang.members, member.node: member},
        heard_s={**gang.heard_s, member.node: now_s},
    )
    if not gang.gathered:
        return gang, (note,)
    gang, more = _plan(gang, "all node agents have joined", now_s)
    return gang, (note, *more)


def _beaten(gang: Gang, event: Beaten, spec: GangSpec, now_s: float) -> Outcome:
    if not is_member(gang, event.node, event.agent):
        return gang, ()
    member = replace(gang.members[event.node], port=event.port)
    gang = replace(
        gang,
        members={**gang.members, event.node: member},
        heard_s={**gang.heard_s, event.node: now_s},
    )
    if gang.status is Status.GATHERING and gang.gathered and not silent_nodes(gang, now_s):
        return _plan(gang, gang.reason, now_s)
    plan = gang.plan
    if plan is None or event.generation != plan.generation or gang.status not in LEADING:
        return gang, _died(event)
    gang = replace(gang, beats={**gang.beats, **{beat.rank: beat for beat in event.ranks}})
    gang, notes = _progressed(gang, plan, now_s)
    dead = [beat for beat in event.ranks if beat.exit_code not in (None, 0)]
    if dead:
        slot = plan.slots[dead[0].rank]
        why = f"rank {dead[0].rank} on {slot.gpu} {_how(dead[0].exit_code)}"
        again, more = _again(gang, why, spec, now_s)
        return again, (*notes, *more)
    if len(gang.beats) == plan.world_size and all(beat.exit_code == 0 for beat in gang.beats.values()):
        done, more = _all_left(gang, spec, now_s)
        return done, (*notes, *more)
    hung, more = _hung(gang, event.ranks, spec, now_s)
    if hung is not gang:
        return hung, (*notes, *more)
    changed, more = _changed(gang, now_s)
    return changed, (*notes, *more)


def _died(event: Beaten) -> tuple[Note, ...]:
    """A killed rank's peers fail too, and may be heard of first: the cause comes late, but it is written down."""
    killed = [beat for beat in event.ranks if beat.exit_code is not None and beat.exit_code < 0]
    return tuple(
        Note(
            kind="rank_died",
            reason=f"rank {beat.rank} on node {event.node[:12]} {_how(beat.exit_code)}",
            data={"generation": event.generation, "node": event.node, "rank": beat.rank},
        )
        for beat in killed
    )


def _evicted(gang: Gang, event: Evicted, now_s: float) -> Outcome:
    of_node = next((node.gpus for node in gang.grant.nodes if node.node == event.node), ())
    leaving = frozenset({event.gpu}) if event.gpu is not None else frozenset(of_node)
    if leaving <= gang.evicted:
        return gang, ()
    held = gang.plan is not None and any(slot.gpu in leaving for slot in gang.plan.slots)
    data = {"node": event.node, "gpus": sorted(leaving), "step": gang.step, "save_by_s": event.save_by_s}
    if event.save_by_s is not None and held and gang.status is Status.RUNNING and event.save_by_s > now_s:
        if gang.drain is not None and leaving <= gang.drain.gpus and event.save_by_s >= gang.drain.by_s:
            return gang, ()
        before = gang.drain.gpus if gang.drain is not None else frozenset()
        by_s = min(event.save_by_s, gang.drain.by_s) if gang.drain is not None else event.save_by_s
        drain = Drain(gpus=leaving | before, reason=event.reason, by_s=by_s)
        return replace(gang, drain=drain), (Note(kind="draining", reason=event.reason, data=data),)
    drained = gang.drain.gpus if gang.drain is not None else frozenset()
    gang = replace(gang, evicted=gang.evicted | leaving | drained, drain=None)
    note = Note(kind="evicted", reason=event.reason, data=data)
    if not held or gang.status not in LEADING:
        return gang, (note,)
    gang, more = _plan(replace(gang, fault_at_s=now_s), event.reason, now_s)
    return gang, (note, *more)


def _regranted(gang: Gang, grant: Grant, now_s: float) -> Outcome:
    if grant.generation <= gang.grant.generation:
        stands = grant.generation == gang.grant.generation and not gang.grant_stands
        return (replace(gang, grant_stands=True) if stands else gang), ()
    listed = frozenset(gpu for node in grant.nodes for gpu in node.gpus)
    moved = grant.placement_group != gang.grant.placement_group
    gang = replace(gang, grant=grant, grant_stands=True, evicted=gang.evicted - listed)
    note = Note(
        kind="regranted",
        reason=f"{len(listed)} GPUs on {len(grant.nodes)} nodes" + (f" of {grant.placement_group}" if moved else ""),
        data={"nodes": list(gang.nodes), "generation": grant.generation, "moved": moved},
    )
    if moved or gang.status is Status.LEFT:
        gang = _scattered(gang, now_s)
        return replace(gang, leave=None, drain=None, formed_at_s=None, regroups=0, reason=note.reason), (note,)
    if gang.status is Status.SHORT and gang.gathered:
        gang, more = _plan(gang, "enough GPUs are fit again", now_s)
        return gang, (note, *more)
    return replace(gang, changing=_would_change(gang)), (note,)


def _ungranted(gang: Gang, now_s: float) -> Outcome:
    if not gang.grant_stands or gang.status is Status.LEFT:
        return gang, ()
    why = f"{gang.grant.placement_group} is taken away; another grant is awaited"
    scattered = replace(_scattered(gang, now_s), grant_stands=False, formed_at_s=None, drain=None, reason=why)
    return scattered, (Note(kind="ungranted", reason=why),)


def _leave_asked(gang: Gang, event: LeaveAsked) -> Outcome:
    if gang.status is Status.LEFT or gang.leave == event:
        return gang, ()
    notes = (Note(kind="leave", reason=event.reason, data={"by_s": event.by_s}),) if gang.leave is None else ()
    if gang.status is Status.RUNNING:
        return replace(gang, leave=event), notes
    gang, more = _left(gang, event.reason)  # nothing is in memory that the newest checkpoint doesn't have
    return gang, (*notes, *more)


def _stop_asked(gang: Gang, reason: str) -> Outcome:
    if gang.status is Status.RUNNING:
        return replace(gang, stop_reason=reason), (Note(kind="stop", reason=reason),)
    # Nothing is in memory that the newest checkpoint doesn't have.
    return _end(gang, Status.FINISHED, reason)


def _train_lost(gang: Gang, event: TrainLost, now_s: float) -> Outcome:
    if event.train != gang.train or gang.status is Status.LEFT:
        return gang, ()
    note = Note(kind="train_lost", reason=event.error, data={"train": event.train})
    return replace(_scattered(gang, now_s), train=gang.train + 1, formed_at_s=None), (note,)


def _ticked(gang: Gang, spec: GangSpec, now_s: float) -> Outcome:
    leave, drain = gang.leave, gang.drain
    if leave is not None and leave.by_s is not None and now_s >= leave.by_s - spec.save_margin_s:
        return _left(gang, f"{leave.reason}; not saved in time")
    if drain is not None and now_s >= drain.by_s - spec.save_margin_s:
        return _drained(gang, "not saved in time", now_s)
    if gang.status is Status.SHORT and now_s - (gang.short_since_s or now_s) > spec.short_deadline_s:
        return _end(gang, Status.FAILED, f"{gang.reason}; no others came within {spec.short_deadline_s:.0f} s")
    if gang.formed_at_s is not None and now_s - gang.formed_at_s > spec.join_deadline_s:
        missing = [node[:12] for node in gang.nodes if node not in gang.members]
        why = f"no agent of {', '.join(missing)} has joined within {spec.join_deadline_s:.0f} s"
        return _train_lost(gang, TrainLost(train=gang.train, error=why), now_s)
    return gang, ()


# --- what beats tell --------------------------------------------------------------------------------------------


def _progressed(gang: Gang, plan: Plan, now_s: float) -> Outcome:
    """Take over what the beats say: steps, commits, and whether this generation has made its first step."""
    committed = max(beat.committed_step for beat in gang.beats.values()) if gang.beats else -1
    if committed > gang.committed_step:
        gang = replace(gang, committed_step=committed, committed_at_s=now_s, barren=(), regroups=0, hung_in=None)
    if len(gang.beats) < plan.world_size:
        return gang, ()
    step = min(beat.step for beat in gang.beats.values())
    if step <= gang.step:
        return gang, ()
    at_s = max(beat.progress_at_s for beat in gang.beats.values())
    best = max(step, gang.best_step)
    if gang.status is not Status.LAUNCHING:
        steps = step - gang.step
        per_step_s = (at_s - gang.stepped_at_s) / steps
        pace = (*gang.pace, *(per_step_s,) * min(steps, PACE_STEPS))[-PACE_STEPS:]
        return replace(gang, step=step, best_step=best, pace=pace, stepped_at_s=at_s), ()
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
            "from_plan_s": first_at_s - gang.planned_at_s,
        },
    )
    gang = replace(gang, status=Status.RUNNING, step=step, best_step=best, stepped_at_s=at_s, fault_at_s=None)
    return gang, (note,)


def _all_left(gang: Gang, spec: GangSpec, now_s: float) -> Outcome:
    """Every rank has ended well. Why: the run is done, or they were told to save and leave."""
    if gang.step >= gang.steps or not any(beat.stopping for beat in gang.beats.values()):
        return _end(gang, Status.FINISHED, f"all {gang.steps} steps are done")
    if gang.stop_reason is not None:
        return _end(gang, Status.FINISHED, gang.stop_reason)
    if gang.leave is not None:
        return _left(gang, gang.leave.reason)
    if gang.drain is not None:
        return _drained(gang, f"saved at step {gang.committed_step}", now_s)
    return _again(gang, f"the ranks left at step {gang.step}, which nobody here had asked for", spec, now_s)


def _hung(gang: Gang, seen: tuple[RankBeat, ...], spec: GangSpec, now_s: float) -> Outcome:
    hang = find_hang(
        seen,
        gang.beats,
        launching_for_s=now_s - gang.planned_at_s if gang.status is Status.LAUNCHING else None,
        step=gang.step,
        pace=gang.pace,
        spec=spec,
    )
    if hang is None or gang.plan is None:
        return gang, ()
    slots = [gang.plan.slots[rank] for rank in hang.suspects]
    blamed = {"suspects": [{"rank": slot.rank, "gpu": slot.gpu, "node": slot.node} for slot in slots]}
    note = Note(kind="hung", reason=hang.reason, data={"step": hang.step, **blamed, "ranks": hang.ranks})
    if gang.hung_in == hang.signature:
        who = f"; suspects: {', '.join(f'rank {slot.rank} on {slot.gpu}' for slot in slots)}" if slots else ""
        why = f"hung twice in the same place, at step {hang.step} in {hang.phase}: {hang.reason}{who}"
        gang, more = _end(gang, Status.FAILED, why)
        return gang, (note, *more)
    gang, more = _again(replace(gang, hung_in=hang.signature), hang.reason, spec, now_s)
    return gang, (note, *more)


def _changed(gang: Gang, now_s: float) -> Outcome:
    """GPUs come in, and bad ones leave, with a checkpoint: nothing is done twice for them."""
    if not gang.changing or gang.status is not Status.RUNNING or is_asked_to_save(gang):
        return gang, ()
    if gang.committed_step < 0 or gang.committed_at_s != now_s:
        return gang, ()
    return _plan(replace(gang, fault_at_s=now_s), "the grant lists other GPUs", now_s)


# --- what follows -----------------------------------------------------------------------------------------------


def _again(gang: Gang, why: str, spec: GangSpec, now_s: float) -> Outcome:
    """A new generation on the same GPUs, unless they keep dying without getting anywhere, or were leaving anyway."""
    if gang.stop_reason is not None:
        return _end(gang, Status.FINISHED, f"{gang.stop_reason}; not saved, since {why}")
    if gang.leave is not None:
        return _left(gang, f"{gang.leave.reason}; not saved, since {why}")
    if gang.drain is not None:
        return _drained(gang, f"not saved, since {why}", now_s)
    mine = frozenset(slot.node for slot in gang.plan.slots) if gang.plan is not None else frozenset()
    barren = (*gang.barren, mine) if gang.committed_step == gang.committed_at_plan else ()
    if len(barren) >= spec.no_progress_generations:
        common = sorted(frozenset.intersection(*barren))
        named = f"; suspect nodes: {', '.join(node[:12] for node in common)}" if common else "; no node was in all"
        why = f"{len(barren)} generations in a row ended without a new checkpoint; last: {why}{named}"
        return _end(replace(gang, barren=barren), Status.FAILED, why)
    return _plan(replace(gang, barren=barren, fault_at_s=now_s), why, now_s)


def _plan(gang: Gang, why: str, now_s: float) -> Outcome:
    """The next generation over all granted GPUs that are not evicted."""
    silent = silent_nodes(gang, now_s)
    if not gang.gathered or silent:
        missing = silent or [node for node in gang.nodes if node not in gang.members]
        note = Note(kind="waits", reason=f"{why}; no word from {', '.join(node[:12] for node in missing)}")
        waits = replace(gang, status=Status.GATHERING, formed_at_s=gang.formed_at_s or now_s, beats={}, reason=why)
        return waits, (note,)
    slots = slots_of(gang)
    if len(slots) < gang.min_ranks:
        why = f"{len(slots)} GPUs are left, at least {gang.min_ranks} are needed; {why}"
        short = replace(gang, status=Status.SHORT, short_since_s=now_s, formed_at_s=None, beats={}, reason=why)
        return short, (Note(kind="short", reason=why),)
    first = gang.members[slots[0].node]
    generation = Generation(gang.generation + 1)
    plan = Plan(generation=generation, master_address=first.address, master_port=first.port, slots=slots)
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
        generation=generation,
        plan=plan,
        planned_at_s=now_s,
        formed_at_s=None,
        short_since_s=None,
        changing=False,
        beats={},
        step=-1,
        committed_at_plan=gang.committed_step,
        reason=why,
    )
    return gang, (note,)


def _would_change(gang: Gang) -> bool:
    """Whether a GPU that holds a rank is listed no more, or there is room for more ranks."""
    if gang.plan is None or gang.status not in LEADING:
        return False
    listed = {gpu for node in gang.nodes for gpu in fit_gpus(gang, node)}
    return any(slot.gpu not in listed for slot in gang.plan.slots) or len(slots_of(gang)) > gang.plan.world_size


def _scattered(gang: Gang, now_s: float) -> Gang:
    """Its agents are gone, and with them their ranks."""
    fault_at_s = gang.fault_at_s if gang.fault_at_s is not None or gang.plan is None else now_s
    return replace(
        gang,
        status=Status.GATHERING,
        members={},
        heard_s={},
        beats={},
        fault_at_s=fault_at_s,
        changing=False,
        short_since_s=None,
    )


def _drained(gang: Gang, how: str, now_s: float) -> Outcome:
    drain = gang.drain
    assert drain is not None
    gang = replace(gang, drain=None, evicted=gang.evicted | drain.gpus, fault_at_s=now_s)
    data = {"gpus": sorted(drain.gpus), "committed_step": gang.committed_step}
    note = Note(kind="evicted", reason=f"{drain.reason}; {how}", data=data)
    gang, more = _plan(gang, f"{drain.reason}; {how}", now_s)
    return gang, (note, *more)


def _left(gang: Gang, reason: str) -> Outcome:
    gang = replace(
        gang,
        status=Status.LEFT,
        plan=None,
        members={},
        heard_s={},
        beats={},
        drain=None,
        changing=False,
        formed_at_s=None,
        fault_at_s=None,
        leave=None,
        reason=reason,
    )
    return gang, (Note(kind="left", reason=reason, data={"committed_step": gang.committed_step}),)


def _end(gang: Gang, status: Status, reason: str) -> Outcome:
    return replace(gang, status=status, reason=reason), (Note(kind=str(status), reason=reason),)


def _how(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"was killed by signal {-exit_code}"
    return f"ended with exit code {exit_code}"
