"""What follows in a gang's life: the next generation, a wait for one, its leave, or its end. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

from tidegate.gang.plan import Plan, ShelfAt
from tidegate.gang.shape import LEADING, Gang, Note, Status, fit_gpus, silent_nodes, slots_of
from tidegate.ids import Generation
from tidegate.spec.policy import GangSpec

Outcome: TypeAlias = tuple[Gang, tuple[Note, ...]]


def again(gang: Gang, why: str, spec: GangSpec, now_s: float) -> Outcome:
    """A new generation on the same GPUs, unless they keep dying without getting anywhere, or were leaving anyway."""
    if gang.stop_reason is not None:
        return end(gang, Status.FINISHED, f"{gang.stop_reason}; not saved, since {why}")
    if gang.leave is not None:
        return left(gang, f"{gang.leave.reason}; not saved, since {why}")
    if gang.drain is not None:
        return drained(gang, f"not saved, since {why}", now_s)
    mine = frozenset(slot.node for slot in gang.plan.slots) if gang.plan is not None else frozenset()
    barren = (*gang.barren, mine) if gang.committed_step == gang.committed_at_plan else ()
    if len(barren) >= spec.no_progress_generations:
        common = sorted(frozenset.intersection(*barren))
        named = f"; suspect nodes: {', '.join(node[:12] for node in common)}" if common else "; no node was in all"
        why = f"{len(barren)} generations in a row ended without a new checkpoint; last: {why}{named}"
        return end(replace(gang, barren=barren), Status.FAILED, why)
    return plan_next(replace(gang, barren=barren, fault_at_s=now_s), why, now_s)


def plan_next(gang: Gang, why: str, now_s: float) -> Outcome:
    """The next generation over all granted GPUs that are not evicted."""
    silent = silent_nodes(gang, now_s)
    if not gang.gathered or silent:
        missing = silent or [node for node in gang.nodes if node not in gang.members]
        note = Note(kind="waits", reason=f"{why}; no word from {', '.join(node[:12] for node in missing)}")
        waits = replace(gang, status=Status.GATHERING, formed_at_s=gang.formed_at_s or now_s, beats={}, reason=why)
        return waits, (note,)
    slots = slots_of(gang)
    if len(slots) < gang.min_ranks:
        left = sum(len(fit_gpus(gang, node)) for node in gang.nodes)
        usable = f", of which the run's mesh can use {len(slots)}" if left > len(slots) else ""
        why = f"{left} GPUs are left{usable}, at least {gang.min_ranks} are needed; {why}"
        short = replace(gang, status=Status.SHORT, short_since_s=now_s, formed_at_s=None, beats={}, reason=why)
        return short, (Note(kind="short", reason=why),)
    first = gang.members[slots[0].node]
    generation = Generation(gang.generation + 1)
    plan = Plan(
        generation=generation,
        master_address=first.address,
        master_port=first.port,
        slots=slots,
        shelves=tuple(
            ShelfAt(node=member.node, address=member.address, port=member.shelf_port, domain=member.domain)
            for member in gang.members.values()
            if member.shelf_port
        ),
    )
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


def would_change(gang: Gang) -> bool:
    """Whether a GPU that holds a rank is listed no more, or there is room for more ranks."""
    if gang.plan is None or gang.status not in LEADING:
        return False
    listed = {gpu for node in gang.nodes for gpu in fit_gpus(gang, node)}
    return any(slot.gpu not in listed for slot in gang.plan.slots) or len(slots_of(gang)) > gang.plan.world_size


def scattered(gang: Gang, now_s: float) -> Gang:
    """Its agents are gone, and with them their ranks."""
    fault_at_s = gang.fault_at_s if gang.fault_at_s is not None or gang.plan is None else now_s
    return replace(_alone(gang), status=Status.GATHERING, fault_at_s=fault_at_s, short_since_s=None)


def _alone(gang: Gang) -> Gang:
    """Without its agents, and without what they told."""
    return replace(gang, members={}, heard_s={}, beats={}, changing=False)


def drained(gang: Gang, how: str, now_s: float) -> Outcome:
    drain = gang.drain
    assert drain is not None
    gang = replace(gang, drain=None, evicted=gang.evicted | drain.gpus, fault_at_s=now_s)
    data = {"gpus": sorted(drain.gpus), "committed_step": gang.committed_step}
    note = Note(kind="evicted", reason=f"{drain.reason}; {how}", data=data)
    gang, more = plan_next(gang, f"{drain.reason}; {how}", now_s)
    return gang, (note, *more)


def left(gang: Gang, reason: str) -> Outcome:
    gang = replace(
        _alone(gang),
        status=Status.LEFT,
        plan=None,
        drain=None,
        formed_at_s=None,
        fault_at_s=None,
        leave=None,
        reason=reason,
    )
    return gang, (Note(kind="left", reason=reason, data={"committed_step": gang.committed_step}),)


def end(gang: Gang, status: Status, reason: str) -> Outcome:
    return replace(gang, status=status, reason=reason), (Note(kind=str(status), reason=reason),)
