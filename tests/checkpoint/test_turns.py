"""Which checkpoint is due, which copy may change, and how often to save."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.checkpoint.turns import Due, due, next_slot, young_daly_s


def test_what_is_due() -> None:
    got = {step: due(step, every_steps=20, ram_every_steps=5) for step in (4, 5, 20, 21, 25)}
    assert got[4] == got[21] == Due(memory=False, disk=False)
    assert not got[4]
    assert got[5] == got[25] == Due(memory=True, disk=False)
    assert got[20] == Due(memory=True, disk=True)
    assert due(20, every_steps=20, ram_every_steps=7) == Due(memory=True, disk=True)
    assert due(5, every_steps=20, ram_every_steps=None) == Due(memory=False, disk=False)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 4)), max_size=40))
def test_a_whole_copy_always_stays_and_none_changes_while_it_is_written(saves: list[tuple[bool, int]]) -> None:
    """A copy is whole when the next one is begun; a save to disk takes some turns more."""
    good: int | None = None
    last: int | None = None
    writing, left = None, 0
    for to_disk, turns in saves:
        good = last if last is not None else good
        slot = next_slot(good, writing if left else None)
        assert not (left and slot == writing)
        assert slot != good or (left and writing == 1 - slot)  # what is being written is whole in memory as well
        last, left = slot, max(0, left - 1)
        if to_disk and not left:
            writing, left = slot, turns


def test_young_daly() -> None:
    """A save of a minute and a failure a day: every 2.9 hours is √(2·60·86400) = 3220 s, a little less by Daly."""
    assert young_daly_s(60, 86400) == pytest.approx(3180, abs=1)
    assert young_daly_s(1e-6, 86400) == pytest.approx(math.sqrt(2 * 1e-6 * 86400), rel=1e-3)
    assert young_daly_s(500, 200) == 200
    with pytest.raises(ValueError):
        young_daly_s(1, 0)


@given(st.floats(0.01, 50), st.floats(200, 1e7))
def test_no_other_interval_loses_less(save_s: float, failure_s: float) -> None:
    """Against Daly's exact waste for exponential failures: no interval half or twice as long is better."""

    def lost(interval_s: float) -> float:
        return failure_s * math.expm1((interval_s + save_s) / failure_s) / interval_s

    best = young_daly_s(save_s, failure_s)
    assert lost(best) <= min(lost(best / 2), lost(best * 2)) * (1 + 1e-9)
