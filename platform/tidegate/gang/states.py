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
from typing import assert_never

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
from tidegate.gang.generations import Outcome, drained, end, left, plan_next, scattered, would_change
from tidegate.gang.plan import Member
from tidegate.gang.progress import beaten
from tidegate.gang.shape import (
    ENDED,
    LEADING,
    Drain,
    Gang,
    Note,
    Status,
    fit_gpus,
    is_member,
)
from tidegate.spec.policy import GangSpec

MOST_REGROUPS = 10
"""Restarts of Ray Train's worker group in a row without a new checkpoint after which the run stops and says so."""


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
            return beaten(gang, event, spec, now_s)
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
            return end(gang, Status.FAILED, event.error)
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
        return end(gang, Status.FAILED, f"{regroups} restarts of Ray Train's workers without a new checkpoint")
    where = f"{len(gang.nodes)} nodes of {gang.grant.placement_group}"
    note = Note(
        kind="group_restarted" if again else "forming",
        reason=f"Ray Train starts its workers {'anew ' if again else ''}on {where}",
        data={"nodes": list(gang.nodes), "train": gang.train},
    )
    return replace(scattered(gang, now_s), formed_at_s=now_s, regroups=regroups), (note,)


def _joined(gang: Gang, member: Member, now_s: float) -> Outcome:
    if member.node not in gang.nodes or gang.status is Status.LEFT or is_member(gang, member.node, member.agent):
        return gang, ()
    reason = f"agent of {member.node[:12]} with {len(fit_gpus(gang, member.node))} GPUs"
    note = Note(kind="joined", reason=reason, data={"node": member.node, **member.times})
    if member.node in gang.members:
        gang = scattered(gang, now_s)
    gang = replace(
        gang,
        members={**gang.members, member.node: member},
        heard_s={**gang.heard_s, member.node: now_s},
    )
    if not gang.gathered:
        return gang, (note,)
    gang, more = plan_next(gang, "all node agents have joined", now_s)
    return gang, (note, *more)


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
    gang, more = plan_next(replace(gang, fault_at_s=now_s), event.reason, now_s)
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
        gang = scattered(gang, now_s)
        return replace(gang, leave=None, drain=None, formed_at_s=None, regroups=0, reason=note.reason), (note,)
    if gang.status is Status.SHORT and gang.gathered:
        gang, more = plan_next(gang, "enough GPUs are fit again", now_s)
        return gang, (note, *more)
    return replace(gang, changing=would_change(gang)), (note,)


def _ungranted(gang: Gang, now_s: float) -> Outcome:
    if not gang.grant_stands or gang.status is Status.LEFT:
        return gang, ()
    why = f"{gang.grant.placement_group} is taken away; another grant is awaited"
    gang = replace(scattered(gang, now_s), grant_stands=False, formed_at_s=None, drain=None, reason=why)
    return gang, (Note(kind="ungranted", reason=why),)


def _leave_asked(gang: Gang, event: LeaveAsked) -> Outcome:
    if gang.status is Status.LEFT or gang.leave == event:
        return gang, ()
    notes = (Note(kind="leave", reason=event.reason, data={"by_s": event.by_s}),) if gang.leave is None else ()
    if gang.status is Status.RUNNING:
        return replace(gang, leave=event), notes
    gang, more = left(gang, event.reason)  # nothing is in memory that the newest checkpoint doesn't have
    return gang, (*notes, *more)


def _stop_asked(gang: Gang, reason: str) -> Outcome:
    if gang.status is Status.RUNNING:
        return replace(gang, stop_reason=reason), (Note(kind="stop", reason=reason),)
    # Nothing is in memory that the newest checkpoint doesn't have.
    return end(gang, Status.FINISHED, reason)


def _train_lost(gang: Gang, event: TrainLost, now_s: float) -> Outcome:
    if event.train != gang.train or gang.status is Status.LEFT:
        return gang, ()
    note = Note(kind="train_lost", reason=event.error, data={"train": event.train})
    return replace(scattered(gang, now_s), train=gang.train + 1, formed_at_s=None), (note,)


def _ticked(gang: Gang, spec: GangSpec, now_s: float) -> Outcome:
    leave, drain = gang.leave, gang.drain
    if leave is not None and leave.by_s is not None and now_s >= leave.by_s - spec.save_margin_s:
        return left(gang, f"{leave.reason}; not saved in time")
    if drain is not None and now_s >= drain.by_s - spec.save_margin_s:
        return drained(gang, "not saved in time", now_s)
    if gang.status is Status.SHORT and now_s - (gang.short_since_s or now_s) > spec.short_deadline_s:
        return end(gang, Status.FAILED, f"{gang.reason}; no others came within {spec.short_deadline_s:.0f} s")
    if gang.formed_at_s is not None and now_s - gang.formed_at_s > spec.join_deadline_s:
        missing = [node[:12] for node in gang.nodes if node not in gang.members]
        why = f"no agent of {', '.join(missing)} has joined within {spec.join_deadline_s:.0f} s"
        return _train_lost(gang, TrainLost(train=gang.train, error=why), now_s)
    return gang, ()
