"""How a gang looks from outside: its report to the arbiter, its status for the job, its metrics."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ray.util.metrics import Gauge

from tidegate.arbiter.messages import GangPhase, GangReport
from tidegate.gang.order import RunStatus
from tidegate.gang.shape import Gang, Status, phase_of
from tidegate.ids import ClaimId


def report_of(gang: Gang, claim: ClaimId, now_s: float, *, over: bool) -> GangReport:
    """`over`: the run has ended, however the gang stands."""
    phase = phase_of(gang)
    if over:
        phase = GangPhase.FINISHED if gang.status is Status.FINISHED else GangPhase.FAILED
    slots = gang.plan.slots if gang.plan is not None and gang.status is not Status.SHORT else ()
    return GangReport(
        claim=claim,
        at_s=now_s,
        phase=phase,
        gang_generation=gang.generation,
        step=gang.best_step,
        world_size=len(slots),
        gpus=tuple(slot.gpu for slot in slots),
        pids=tuple(gang.beats[slot.rank].pid if slot.rank in gang.beats else None for slot in slots),
        compute_s=tuple(gang.beats[slot.rank].compute_s if slot.rank in gang.beats else None for slot in slots),
        loss=loss_of(gang),
        images_per_s=_first(beat.images_per_s for beat in gang.beats.values()),
        mfu=_first(beat.mfu for beat in gang.beats.values()),
        committed_step=gang.committed_step,
        committed_at_s=gang.committed_at_s,
        grant_generation=gang.grant.generation,
        reason=gang.reason,
    )


def status_of(gang: Gang | None, ended: tuple[str, str] | None, steps: int, *, over: bool) -> RunStatus:
    """`ended`: how the run has ended, and why."""
    state, reason = (str(gang.status), gang.reason) if gang is not None else ("claiming", "")
    if ended is not None:
        state, reason = ended
    return RunStatus(
        state=state,
        reason=reason,
        step=gang.best_step if gang else -1,
        steps=steps,
        loss=loss_of(gang) if gang else None,
        world_size=gang.plan.world_size if gang and gang.plan else 0,
        generation=gang.generation if gang else 0,
        over=over,
    )


def loss_of(gang: Gang) -> float | None:
    return _first(beat.loss for beat in gang.beats.values())


def _first(values: Iterable[float | None]) -> float | None:
    return next((value for value in values if value is not None), None)


class Gauges:
    """The run's metrics; Ray exports them with the prefix `ray_`."""

    def __init__(self, run: str) -> None:
        self._tags = {"run": run}
        self._step = Gauge("tidegate_train_step", "Steps done", tag_keys=("run",))
        self._loss = Gauge("tidegate_train_loss", "Loss of the newest step", tag_keys=("run",))
        self._speed = Gauge(
            "tidegate_train_images_per_second", "Images of the newest step by its time", tag_keys=("run",)
        )
        self._mfu = Gauge("tidegate_train_mfu_ratio", "Model FLOPs utilisation of the newest step", tag_keys=("run",))
        self._ranks = Gauge("tidegate_train_ranks", "Ranks of the present generation", tag_keys=("run",))
        self._generation = Gauge("tidegate_train_generation", "Fencing number of the gang", tag_keys=("run",))

    def end(self) -> None:
        """The run is over: its series end with it, though this process lives on (a NaN ends a series of Ray's)."""
        for gauge in (self._step, self._loss, self._speed, self._mfu, self._ranks, self._generation):
            gauge.set(math.nan, self._tags)

    def show(self, report: GangReport) -> None:
        self._step.set(report.step, self._tags)
        self._ranks.set(report.world_size, self._tags)
        self._generation.set(report.gang_generation, self._tags)
        if report.loss is not None:
            self._loss.set(report.loss, self._tags)
        if report.images_per_s is not None:
            self._speed.set(report.images_per_s, self._tags)
        if report.mfu is not None:
            self._mfu.set(report.mfu, self._tags)
