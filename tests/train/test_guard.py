"""When a step is not trusted. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable

from tidegate.train.config import GuardSpec
from tidegate.train.guard import Do, Guarded, judge

SPEC = GuardSpec()


def rulings(losses: Iterable[float], spec: GuardSpec = SPEC) -> list[Do]:
    guarded, found = Guarded(), []
    for loss in losses:
        guarded, ruling = judge(guarded, spec, loss, finite=math.isfinite(loss))
        found.append(ruling.do)
    return found


def test_three_spikes_roll_back_and_the_fourth_ends_the_run() -> None:
    """C084."""
    found = rulings([*([1.0] * 50 + [3.5]) * 4])
    assert [(place, do) for place, do in enumerate(found, 1) if do is not Do.GO] == [
        (51, Do.ROLL_BACK),
        (102, Do.ROLL_BACK),
        (153, Do.ROLL_BACK),
        (204, Do.GIVE_UP),
    ]


def test_a_spike_is_over_the_running_mean_of_a_full_window() -> None:
    assert set(rulings([1.0] * 49 + [100.0])) == {Do.GO}, "too few steps to say what is usual"
    assert rulings([1.0] * 50 + [3.0])[-1] is Do.GO, "at the limit, not over it"
    # Early losses have left the window: what is usual now is 0.5.
    assert rulings([10.0] * 50 + [0.5] * 50 + [1.6])[-1] is Do.ROLL_BACK
    assert rulings([1.0] * 50 + [1e9], GuardSpec(spike_factor=None))[-1] is Do.GO


def test_a_spike_does_not_raise_what_is_usual() -> None:
    assert rulings([1.0] * 50 + [3.5, 3.5])[-2:] == [Do.ROLL_BACK, Do.ROLL_BACK]


def test_what_is_not_finite_is_skipped_and_several_in_a_row_roll_back() -> None:
    nan, inf = math.nan, math.inf
    assert rulings([nan, inf, nan, 1.0, nan]) == [Do.SKIP, Do.SKIP, Do.SKIP, Do.GO, Do.SKIP]
    assert rulings([nan] * 8) == [*[Do.SKIP] * 3, Do.ROLL_BACK] * 2
    assert rulings([nan] * 16)[-1] is Do.GIVE_UP
    assert rulings([nan], GuardSpec(not_finite_max=0, rollbacks_max=0)) == [Do.GIVE_UP]


def test_a_ruling_says_why() -> None:
    guarded = Guarded(recent=(1.0,) * 50, rollbacks=3)
    after, ruling = judge(guarded, SPEC, 4.0, finite=True)
    assert after == guarded
    assert ruling.reason == "the loss, 4, is over 3 times 1, the mean of 50 steps; 3 roll-backs are spent"
