"""When a gang counts as hung, and who is suspected. Pure.

What is watched is progress, not liveness: a rank whose process is well but whose numbers stand still is hung, whatever
it waits for (C046). Each phase has its own limit, for a save may take what a step may not.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tidegate.gang.plan import RankBeat
from tidegate.spec.policy import GangSpec
from tidegate.train.progress import Phase

PACE_STEPS = 21
"""A median over so many: one slow step among them moves nothing."""
_STOPPED = ("T", "t", "D")
_ORDER = {str(phase): place for place, phase in enumerate(Phase)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    reason: str
    step: int
    phase: str
    suspects: tuple[int, ...]
    """Ranks."""
    ranks: Mapping[str, object]
    """What each rank did when it was seen, for the journal."""

    @property
    def signature(self) -> tuple[int, str]:
        """A hang that comes back with the same one is no accident."""
        return self.step, self.phase


def step_limit_s(pace: Iterable[float], spec: GangSpec) -> float:
    """max(hang_floor_s, hang_steps × median step time)."""
    steps = tuple(pace)
    return max(spec.hang_floor_s, spec.hang_steps * statistics.median(steps)) if steps else spec.hang_floor_s


def phase_limit_s(phase: str, pace: Iterable[float], spec: GangSpec) -> float:
    """How long a rank that has made its first step may stand still in a phase."""
    match phase:
        case Phase.STEPPING:
            return step_limit_s(pace, spec)
        case Phase.SAVING:
            return spec.save_deadline_s
        case Phase.SAMPLING:
            return spec.sample_deadline_s
        case Phase.EXPORTING:
            return spec.export_deadline_s
        case _:  # it starts again, warms up, or ends
            return spec.start_deadline_s


def find_hang(
    seen: Iterable[RankBeat],
    beats: Mapping[int, RankBeat],
    *,
    launching_for_s: float | None,
    step: int,
    pace: Iterable[float],
    spec: GangSpec,
) -> Hang | None:
    """Whether one of the ranks just `seen` is hung, judged with what all of them did last (`beats`).

    `launching_for_s`: seconds since the generation's plan while its first step is not done, else None. Until then its
    ranks have the start's limit in whole, since imports, rendezvous, restore and compile move nothing that is seen.
    """
    if launching_for_s is not None:
        if launching_for_s <= spec.start_deadline_s:
            return None
        why = f"no first step within {spec.start_deadline_s:.0f} s"
        return _hang(why, step, _furthest_behind(beats.values()), beats)
    for beat in seen:
        if beat.exit_code is None and beat.idle_s > phase_limit_s(beat.phase, pace, spec):
            why = f"rank {beat.rank} has stood still for {beat.idle_s:.1f} s in {beat.phase}"
            return _hang(why, step, beat.phase, beats)
    return None


def suspects(beats: Iterable[RankBeat]) -> tuple[int, ...]:
    """Who is behind: in a hang all others wait for these.

    First whoever the kernel holds still (stopped, or waiting for a device); else whoever has done the fewest steps,
    stands in the earliest phase, or has waited least. Empty where nothing tells them apart.
    """
    alive = [beat for beat in beats if beat.exit_code is None]
    held = [beat.rank for beat in alive if beat.process_state in _STOPPED]
    if held:
        return tuple(sorted(held))
    for behind in (
        lambda beat: beat.step,
        lambda beat: _ORDER.get(beat.phase, 0),
        lambda beat: round(beat.idle_s),
    ):
        least = min(map(behind, alive), default=0)
        ranks = tuple(sorted(beat.rank for beat in alive if behind(beat) == least))
        if len(ranks) < len(alive):
            return ranks
    return ()


def _hang(why: str, step: int, phase: str, beats: Mapping[int, RankBeat]) -> Hang:
    ranks = {
        str(rank): {
            "phase": beat.phase,
            "step": beat.step,
            "idle_s": round(beat.idle_s, 2),
            "process_state": beat.process_state,
        }
        for rank, beat in sorted(beats.items())
    }
    return Hang(reason=why, step=step, phase=phase, suspects=suspects(beats.values()), ranks=ranks)


def _furthest_behind(beats: Iterable[RankBeat]) -> str:
    return min((beat.phase for beat in beats), key=lambda phase: _ORDER.get(phase, 0), default=str(Phase.STARTING))
