"""The made-up month: its faults are found, its noise takes nothing out."""

from __future__ import annotations

import pytest
from benchmarks.fleet_month import FAULTS, NOISE
from benchmarks.replay import play

KINDS = {kind.name: kind for kind in (*FAULTS, *NOISE)}


@pytest.mark.parametrize(
    ("name", "first", "within_s"),
    [
        ("faulty GPU: lost quietly", "gpu_lost", 3),
        ("thermal interface: heats", "temperature", 80),
        ("slow machine", "sm_clock", 75),
    ],
)
def test_a_fault_is_found_by_its_rule(name: str, first: str, within_s: float) -> None:
    played = play(KINDS[name], seed=7)
    assert played.rules[0] == first
    assert played.after_s is not None
    assert played.after_s <= within_s


@pytest.mark.parametrize("name", ["blanks", "DCGM says 0", "driver reload"])
def test_noise_takes_nothing_out(name: str) -> None:
    assert play(KINDS[name], seed=7).rules == ()


def test_what_shows_nothing_is_missed() -> None:
    assert play(KINDS["silent data corruption: nothing to see"], seed=7).after_s is None
