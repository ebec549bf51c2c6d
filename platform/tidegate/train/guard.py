"""When a step may not change the weights, and when the run goes back to a checkpoint. Pure.

All ranks judge by the same reduced numbers, so they agree without asking each other. A loss or gradient that is not
finite is skipped; several in a row, or a loss far above its running mean, roll the run back: the weights of the newest
checkpoint go on behind the bad samples. There is a budget of such roll-backs; then the run ends.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from tidegate.train.config import GuardSpec


class Do(StrEnum):
    GO = "go"
    SKIP = "skip"
    """Leave the weights as they are."""
    ROLL_BACK = "roll_back"
    GIVE_UP = "give_up"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruling:
    do: Do
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarded:
    """What the guard remembers."""

    rollbacks: int = 0
    """Spent, over all generations of the run."""
    not_finite_in_row: int = 0
    recent: tuple[float, ...] = ()
    """Losses of the last steps that changed the weights, `spike_window_steps` at most."""

    @property
    def usual_loss(self) -> float | None:
        return sum(self.recent) / len(self.recent) if self.recent else None


def judge(guarded: Guarded, spec: GuardSpec, loss: float, *, finite: bool) -> tuple[Guarded, Ruling]:
    """What becomes of a step, before it changes the weights.

    Args:
        loss: mean over the global batch.
        finite: whether the losses of all ranks and the gradient are.
    """
    if not finite:
        in_row = guarded.not_finite_in_row + 1
        if in_row <= spec.not_finite_max:
            return replace(guarded, not_finite_in_row=in_row), Ruling(do=Do.SKIP)
        return _back(guarded, spec, f"{in_row} steps in a row were not finite")
    full = len(guarded.recent) >= spec.spike_window_steps
    if full and spec.spike_factor is not None:
        mean = sum(guarded.recent) / len(guarded.recent)
        if loss > spec.spike_factor * mean:
            usual = f"{mean:.4g}, the mean of {len(guarded.recent)} steps"
            return _back(guarded, spec, f"the loss, {loss:.4g}, is over {spec.spike_factor:g} times {usual}")
    recent = (*guarded.recent, loss)[-spec.spike_window_steps :]
    return replace(guarded, recent=recent, not_finite_in_row=0), Ruling(do=Do.GO)


def _back(guarded: Guarded, spec: GuardSpec, reason: str) -> tuple[Guarded, Ruling]:
    if guarded.rollbacks >= spec.rollbacks_max:
        return guarded, Ruling(do=Do.GIVE_UP, reason=f"{reason}; {guarded.rollbacks} roll-backs are spent")
    after = replace(guarded, rollbacks=guarded.rollbacks + 1, not_finite_in_row=0)
    return after, Ruling(do=Do.ROLL_BACK, reason=reason)
