"""What real machines said under load, at rest and with full counters: nothing of it may take a GPU or a node out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.health.series import NODE, SPEC, Played
from tests.health.test_dcgm_source import Exporter
from tests.health.test_infiniband_source import sample

from tidegate.health.readings import Reading, Signal, Status
from tidegate.health.sources.dcgm import DcgmSource
from tidegate.health.sources.infiniband import InfinibandSource
from tidegate.spec.policy import HealthSpec
from tidegate.testing.fake_clock import FakeClock

SAMPLES = Path(__file__).parent / "samples"
NAMES: Mapping[str, Signal] = {
    "temperature_gpu": Signal.GPU_TEMPERATURE,
    "temperature_gpu_tlimit": Signal.GPU_MARGIN,
    "temperature_memory": Signal.GPU_MEMORY_TEMPERATURE,
    "clocks_current_sm_clock_hz": Signal.GPU_SM_CLOCK,
    "clocks_event_reasons_active": Signal.GPU_CLOCK_REASONS,
    "clocks_event_reasons_counters_hw_thermal_slowdown_seconds": Signal.GPU_THROTTLED_HW_THERMAL,
    "clocks_event_reasons_counters_hw_power_brake_slowdown_seconds": Signal.GPU_THROTTLED_POWER_BRAKE,
    "power_draw_instant_watts": Signal.GPU_POWER,
    "utilization_gpu_ratio": Signal.GPU_UTILIZATION,
    "ecc_errors_uncorrected_volatile_total": Signal.GPU_ECC_UNCORRECTED,
    "ecc_errors_corrected_volatile_total": Signal.GPU_ECC_CORRECTED,
    "remapped_rows_pending": Signal.GPU_ROW_PENDING,
    "remapped_rows_failure": Signal.GPU_ROW_FAILURE,
    "remapped_rows_uncorrectable": Signal.GPU_ROWS_UNCORRECTABLE,
    "pcie_link_gen_current": Signal.GPU_PCIE_GENERATION,
    "pcie_link_gen_max": Signal.GPU_PCIE_GENERATION_MAX,
    "pcie_link_width_current": Signal.GPU_PCIE_WIDTH,
    "pcie_link_width_max": Signal.GPU_PCIE_WIDTH_MAX,
}


def exported(name: str) -> Iterator[Reading]:
    text = (SAMPLES / name).read_text(encoding="utf-8")
    for family in text_string_to_metric_families(text):
        for row in family.samples:
            signal = NAMES.get(row.name.removeprefix("nvidia_smi_"))
            if signal is not None:
                yield Reading(
                    at_s=0.0, node=NODE, subject="GPU-x", signal=signal, value=row.value, status=Status.OK
                )  # fmt: skip


@pytest.mark.parametrize("name", ["exporter-h100-load.metrics", "exporter-h100-mig-load.metrics"])
def test_an_h100_under_load_with_and_without_mig_gets_no_verdict(name: str) -> None:
    readings = list(exported(name))
    assert {reading.signal for reading in readings} >= {Signal.GPU_TEMPERATURE, Signal.GPU_MARGIN, Signal.GPU_POWER}
    played = Played(HealthSpec())
    for second in range(1000, 1300):
        played.look([reading._replace(at_s=float(second)) for reading in readings])
    assert played.verdicts == ()


def test_the_same_h100_20_degrees_hotter_does() -> None:
    """The test above sees something: 59 °C and 20 more are above 78."""
    readings = [
        reading._replace(at_s=1000.0, value=(reading.value or 0) + 20) if reading.signal is Signal.GPU_TEMPERATURE
        else reading._replace(at_s=1000.0)
        for reading in exported("exporter-h100-load.metrics")
    ]  # fmt: skip
    assert Played(HealthSpec()).look(readings).rules == ["temperature"]


@pytest.mark.parametrize("spec", [SPEC, HealthSpec()])
def test_an_h100_host_with_full_counters_is_warned_of_and_stays(tmp_path: Path, spec: HealthSpec) -> None:
    clock = FakeClock()
    source = InfinibandSource(sample("h100-host", tmp_path), node=NODE, clock=clock)
    named = replace_ports(spec, tuple(f"mlx5_{index}/1" for index in (0, 1, 4, 5, 6, 7, 8, 9)))
    played = Played(named)
    for _ in range(120):
        clock.advance(5.0)
        played.look(source.read().readings, clock.now_s())
    assert played.evicting == []
    assert "saturated_ib_excessive_buffer_overruns" in played.rules
    assert any("perfquery -R" in verdict.ends for verdict in played.verdicts)


def replace_ports(spec: HealthSpec, ports: tuple[str, ...]) -> HealthSpec:
    return spec.model_copy(update={"ib_ports": ports if spec.ib_ports else ()})


def test_a_t4_without_a_memory_sensor_gets_no_verdict() -> None:
    """C107, C110: blanks and zeros where a card has no sensor are no readings."""
    clock = FakeClock()
    text = (SAMPLES / "dcgm-t4-drv460-idle.prom").read_text(encoding="utf-8")
    exporter = Exporter()
    exporter.text = text
    source = DcgmSource(exporter.url, node=NODE, clock=clock)
    played = Played(HealthSpec())
    for _ in range(30):
        clock.advance(5.0)
        seen = source.read().readings
        assert any(reading.signal is Signal.GPU_TEMPERATURE for reading in seen)
        played.look(seen, clock.now_s())
    source.close()
    exporter.server.shutdown()
    exporter.server.server_close()
    assert played.verdicts == ()
