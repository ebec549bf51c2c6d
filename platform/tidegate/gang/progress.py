"""What a node agent's beat tells of its ranks: steps, checkpoints, deaths, hangs, and that they have left. Pure."""

from __future__ import annotations

from dataclasses import replace

from tidegate.gang.events import Beaten
from tidegate.gang.generations import Outcome, again, drained, end, left, plan_next
from tidegate.gang.hang import PACE_STEPS, find_hang
from tidegate.gang.plan import Plan, RankBeat
from tidegate.gang.shape import LEADING, Gang, Note, Status, is_asked_to_save, is_member, silent_nodes
from tidegate.spec.policy import GangSpec


def beaten(gang: Gang, event: Beaten, spec: GangSpec, now_s: float) -> Outcome:
    if not is_member(gang, event.node, event.agent):
        return gang, ()
    member = replace(gang.members[event.node], port=event.port)
    gang = replace(
        gang,
        members={**gang.members, event.node: member},
        heard_s={**gang.heard_s, event.node: now_s},
    )
    if gang.status is Status.GATHERING and gang.gathered and not silent_nodes(gang, now_s):
        return plan_next(gang, gang.reason, now_s)
    plan = gang.plan
    if plan is None or event.generation != plan.generation or gang.status not in LEADING:
        return gang, _died(event)
    gang = replace(gang, beats={**gang.beats, **{beat.rank: beat for beat in event.ranks}})
    gang, notes = _progressed(gang, plan, now_s)
    dead = [beat for beat in event.ranks if beat.exit_code not in (None, 0)]
    if dead:
        # One that was killed is the cause; those that ended by themselves may have lost their connection to it.
        first = next((beat for beat in dead if _was_killed(beat)), dead[0])
        why = f"rank {first.rank} on {plan.slots[first.rank].gpu} {_how(first.exit_code)}"
        anew, more = again(gang, why, spec, now_s)
        return anew, (*notes, *more)
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
    killed = [beat for beat in event.ranks if _was_killed(beat)]
    return tuple(
        Note(
            kind="rank_died",
            reason=f"rank {beat.rank} on node {event.node[:12]} {_how(beat.exit_code)}",
            data={"generation": event.generation, "node": event.node, "rank": beat.rank},
        )
        for beat in killed
    )


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
        return end(gang, Status.FINISHED, f"all {gang.steps} steps are done")
    if gang.stop_reason is not None:
        return end(gang, Status.FINISHED, gang.stop_reason)
    if gang.leave is not None:
        return left(gang, gang.leave.reason)
    if gang.drain is not None:
        return drained(gang, f"saved at step {gang.committed_step}", now_s)
    return again(gang, f"the ranks left at step {gang.step}, which nobody here had asked for", spec, now_s)


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
    gang = replace(gang, hung_generation=gang.generation)
    note = Note(kind="hung", reason=hang.reason, data={"step": hang.step, **blamed, "ranks": hang.ranks})
    if gang.hung_in == hang.signature:
        who = f"; suspects: {', '.join(f'rank {slot.rank} on {slot.gpu}' for slot in slots)}" if slots else ""
        why = f"hung twice in the same place, at step {hang.step} in {hang.phase}: {hang.reason}{who}"
        gang, more = end(gang, Status.FAILED, why)
        return gang, (note, *more)
    gang, more = again(replace(gang, hung_in=hang.signature), hang.reason, spec, now_s)
    return gang, (note, *more)


def _changed(gang: Gang, now_s: float) -> Outcome:
    """GPUs come in, and bad ones leave, with a checkpoint: nothing is done twice for them."""
    if not gang.changing or gang.status is not Status.RUNNING or is_asked_to_save(gang):
        return gang, ()
    if gang.committed_step < 0 or gang.committed_at_s != now_s:
        return gang, ()
    return plan_next(replace(gang, fault_at_s=now_s), "the grant lists other GPUs", now_s)


def _was_killed(beat: RankBeat) -> bool:
    return beat.exit_code is not None and beat.exit_code < 0


def _how(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"was killed by signal {-exit_code}"
    return f"ended with exit code {exit_code}"
