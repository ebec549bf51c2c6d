"""Real cards of five generations, as nvidia-smi wrote them down: played through the fake library into our source."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from tests.health.series import Played

from tidegate.health.readings import Reading, Signal, Status
from tidegate.health.sources.nvml import NvmlSource
from tidegate.ids import NodeId
from tidegate.testing.fake_clock import FakeClock
from tidegate.testing.fake_nvml import NvmlState, uuid_of

SAMPLES = Path(__file__).parent / "samples"
CARDS = ("a100", "h100", "t4", "l40s", "b200")
S = Signal
_REASONS = {
    "gpu_idle": 0x1, "sw_power_cap": 0x4, "hw_slowdown": 0x8, "sync_boost": 0x10, "sw_thermal_slowdown": 0x20,
    "hw_thermal_slowdown": 0x40, "hw_power_brake_slowdown": 0x80,
}  # fmt: skip

Paths = tuple[str, ...]


def _number(text: str) -> float:
    return float(text.split()[0])


def _flag(text: str) -> float:
    return {"Yes": 1.0, "Enabled": 1.0, "No": 0.0, "Disabled": 0.0, "None": 0.0}[text]


# C103: one table of where each value stands; drivers have moved some of them. Signal, paths, times.
TABLE: Mapping[Signal, tuple[Paths, Callable[[str], float], float]] = {
    S.GPU_TEMPERATURE: (("temperature/gpu_temp",), _number, 1),
    S.GPU_MARGIN: (("temperature/gpu_temp_tlimit",), _number, 1),
    S.GPU_MEMORY_TEMPERATURE: (("temperature/memory_temp",), _number, 1),
    S.GPU_SLOWDOWN_LIMIT: (("temperature/gpu_temp_slow_threshold",), _number, 1),
    S.GPU_SLOWDOWN_OFFSET: (("temperature/gpu_temp_slow_tlimit_threshold",), _number, 1),
    # `clocks/sm_clock` and not `max_clocks/sm_clock`, which has the same name.
    S.GPU_SM_CLOCK: (("clocks/sm_clock",), _number, 1e6),
    S.GPU_SM_CLOCK_MAX: (("max_clocks/sm_clock",), _number, 1e6),
    S.GPU_POWER: (("gpu_power_readings/instant_power_draw", "gpu_power_readings/power_draw",
                   "power_readings/power_draw"), _number, 1),
    S.GPU_ROW_PENDING: (("remapped_rows/remapped_row_pending",), _flag, 1),
    S.GPU_ROW_FAILURE: (("remapped_rows/remapped_row_failure",), _flag, 1),
    S.GPU_PERSISTENCE: (("persistence_mode",), _flag, 1),
    S.GPU_ECC_ENABLED: (("ecc_mode/current_ecc",), _flag, 1),
}  # fmt: skip
KEYS = {
    S.GPU_TEMPERATURE: "temp", S.GPU_MARGIN: "margin", S.GPU_MEMORY_TEMPERATURE: "field.82.0",
    S.GPU_SLOWDOWN_LIMIT: "threshold.1", S.GPU_SLOWDOWN_OFFSET: "field.194.0", S.GPU_SM_CLOCK: "clock.1",
    S.GPU_SM_CLOCK_MAX: "clock_max.1", S.GPU_POWER: "power_mw", S.GPU_ECC_ENABLED: "ecc_mode",
    S.GPU_PERSISTENCE: "persistence_mode",
}  # fmt: skip
"""The fake library's words for them; rows are one word of four."""


def written(card: str) -> dict[Signal, float]:
    """What the file says, in our units; an element that is missing, or says N/A, is not there."""
    gpu = ET.parse(SAMPLES / f"smi-{card}.xml").getroot().find("gpu")
    assert gpu is not None
    found = {}
    for signal, (paths, parse, times) in TABLE.items():
        texts = [text for path in paths if (text := (gpu.findtext(path) or "N/A").strip()) not in ("N/A", "")]
        if texts:
            found[signal] = parse(texts[0]) * times
    mask = 0
    for family in ("clocks_event_reasons/clocks_event_reason_", "clocks_throttle_reasons/clocks_throttle_reason_"):
        mask |= sum(bit for name, bit in _REASONS.items() if gpu.findtext(family + name) == "Active")
    return {**found, S.GPU_CLOCK_REASONS: float(mask)}


def set_card(state: NvmlState, card: str) -> dict[Signal, float]:
    """GPU 0 of the fake is this card."""
    said = written(card)
    for signal, key in KEYS.items():
        times = {S.GPU_POWER: 1e3, S.GPU_SM_CLOCK: 1e-6, S.GPU_SM_CLOCK_MAX: 1e-6}.get(signal, 1)
        state.set(0, key, f"{said[signal] * times:.0f}" if signal in said else "!3")
    rows = [said.get(signal) for signal in (S.GPU_ROW_PENDING, S.GPU_ROW_FAILURE)]
    state.set(0, "rows", "!3" if None in rows else f"0,0,{rows[0]:.0f},{rows[1]:.0f}")
    state.set(0, "reasons", f"{said[S.GPU_CLOCK_REASONS]:.0f}")
    return said


def look(source: NvmlSource) -> dict[Signal, Reading]:
    return {r.signal: r for r in source.read().readings if r.subject == uuid_of("node-a", 0)}


@pytest.mark.parametrize("card", CARDS)
def test_c103_c098_what_the_file_says_is_what_we_read_and_the_rest_is_unknown(
    card: str, source: NvmlSource, state: NvmlState
) -> None:
    said = set_card(state, card)
    seen = look(source)
    for signal in TABLE:
        if signal in said:
            assert seen[signal].value == pytest.approx(said[signal], abs=0.01), signal
        else:
            assert (seen[signal].value, seen[signal].status) == (None, Status.UNSUPPORTED), signal


def test_c103_the_files_differ_in_what_they_have() -> None:
    """So that the test above is one: rows as plain text, no margin on older cards, no absolute limit on newer ones."""
    assert S.GPU_ROW_PENDING not in written("t4")
    assert S.GPU_MARGIN not in written("a100")
    assert written("a100")[S.GPU_SLOWDOWN_LIMIT] == 89
    assert S.GPU_SLOWDOWN_LIMIT not in written("h100")
    assert (written("h100")[S.GPU_MARGIN], written("h100")[S.GPU_SLOWDOWN_OFFSET]) == (58, -2)
    assert written("a100")[S.GPU_SM_CLOCK] == 210e6
    assert written("a100")[S.GPU_SM_CLOCK_MAX] == 1410e6


@pytest.mark.parametrize("card", CARDS)
def test_c098_an_idle_card_of_any_generation_gets_no_verdict(
    card: str, source: NvmlSource, state: NvmlState, clock: FakeClock, node: NodeId
) -> None:
    set_card(state, card)
    played = Played()
    for _ in range(20):
        clock.advance(60)
        played.look(source.read().readings, clock.now_s())
    assert played.verdicts == ()


@pytest.mark.parametrize("card", CARDS)
def test_a_hot_card_of_any_generation_is_found(
    card: str, source: NvmlSource, state: NvmlState, clock: FakeClock
) -> None:
    set_card(state, card)
    state.set(0, "temp", 79)
    assert Played().look(source.read().readings, clock.now_s()).evicting == ["temperature"]
