"""What `tidegate doctor` says of a machine, and what `tidegate health` shows."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest
from test_infiniband_source import sample
from typer.testing import CliRunner

from tidegate.cli.health import Answer, UnknownNodeError, age, as_rows, choose, node_view, summary
from tidegate.cli.main import app
from tidegate.health.agent import Seen
from tidegate.health.doctor import Check, Found, Limits, durable_write_speed, examine
from tidegate.health.judge import Finding
from tidegate.health.readings import Reading, Signal, Status
from tidegate.ids import NodeId
from tidegate.spec.policy import HealthSpec, SourcesSpec
from tidegate.testing.fake_nvml import NvmlState

GOOD_LIMITS = Limits(resource.RLIM_INFINITY, 1_000_000)


def checks(spec: HealthSpec, limits: Limits = GOOD_LIMITS, speed: float = 2e9) -> dict[str, Check]:
    root = spec.state_path.parent / "root"
    return {check.name: check for check in examine(spec, limits, lambda folder: speed, root)}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return sample("h100-host", tmp_path)


@pytest.fixture
def spec(tmp_path: Path, library: Path, state: NvmlState, tree: Path) -> HealthSpec:
    (tmp_path / "root/sys/module/nvidia_peermem").mkdir(parents=True)
    (tmp_path / "kmsg").touch()
    return HealthSpec(
        nvml_library=str(library),
        state_dir=str(tmp_path / "state"),
        sources=SourcesSpec(ib_root=str(tree), kmsg=str(tmp_path / "kmsg"), dcgm_url=None, disks=(str(tmp_path),)),
    )


def test_a_machine_that_is_well_has_nothing_wrong(spec: HealthSpec) -> None:
    found = checks(spec)
    assert [check for check in found.values() if check.found is Found.WRONG] == []
    assert found["NVML"].text == "the driver answers for 4 GPUs"
    assert found["tensor activity"].found is Found.GOOD
    assert found["InfiniBand"].found is Found.GOOD
    assert found["GPUDirect RDMA"].text == "nvidia_peermem is loaded"
    assert "mlx5_0/1" in found["counters"].text, "the sample's counters stand at their ceiling"
    assert found["counters"].fix == "clear them: perfquery -R"


@pytest.mark.parametrize(
    ("key", "value", "name", "fix"),
    [
        ("gpm", "!4", "tensor activity", "NVreg_RestrictProfilingToAdminUsers=0"),
        ("error", 15, "NVML", "reset it or reboot"),
        ("ecc_mode", 0, "ECC", "nvidia-smi -e 1"),
        ("persistence_mode", 0, "persistence", "nvidia-smi -pm 1"),
        ("mig", 1, "MIG", "nvidia-smi -mig 0"),
        ("field.230.0", 2, "recovery", "nvidia-smi -q"),
        ("rows", "0,0,1,0", "row remapping", "reset"),
        ("field.165.4", 0, "NVLink", "nvidia-smi nvlink -s"),
    ],
)
def test_what_is_wrong_with_a_gpu_is_said_with_its_remedy(
    spec: HealthSpec, state: NvmlState, key: str, value: object, name: str, fix: str
) -> None:
    state.set(1, key, value)
    found = checks(spec)[name]
    assert found.found is Found.WRONG
    assert fix in found.fix or fix in found.text


def test_a_gpu_older_than_hopper_is_sent_to_the_exporter(spec: HealthSpec, state: NvmlState) -> None:
    for index in range(4):
        state.set(index, "gpm", 0)
    found = checks(spec)["tensor activity"]
    assert (found.found, "dcgm-exporter" in found.fix) == (Found.NOTE, True)


@pytest.mark.parametrize(("code", "fix"), [(9, "modprobe nvidia"), (18, "reboot"), (999, "nvidia-smi")])
def test_a_driver_that_does_not_answer_is_told_by_its_own_word(
    spec: HealthSpec, state: NvmlState, code: int, fix: str
) -> None:
    state.set_system("init_error", code)
    found = checks(spec)["NVML"]
    assert found.found is Found.WRONG
    assert fix in found.fix


def test_a_port_that_is_down_no_kernel_log_small_limits_and_a_slow_disk(
    spec: HealthSpec, tree: Path, tmp_path: Path
) -> None:
    (tree / "mlx5_4" / "ports" / "1" / "state").write_text("1: DOWN")
    (tmp_path / "kmsg").unlink()
    found = checks(spec, Limits(65_536, 1024), speed=50e6)
    assert "mlx5_4/1" in found["InfiniBand"].text
    assert "CAP_SYSLOG" in found["kernel log"].fix
    assert (found["locked memory"].found, found["open files"].found) == (Found.WRONG, Found.NOTE)
    assert "50 MB/s" in found["disk speed"].text


def test_small_locked_memory_is_wrong_only_where_rdma_needs_it(spec: HealthSpec, tmp_path: Path) -> None:
    bare = spec.model_copy(update={"sources": spec.sources.model_copy(update={"ib_root": str(tmp_path / "none")})})
    found = checks(bare, Limits(65_536, 1_000_000))
    assert found["locked memory"].found is Found.NOTE
    assert found["InfiniBand"].found is Found.NOTE


def test_a_folder_that_can_not_be_written_is_wrong(spec: HealthSpec, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    assert checks(spec)["disk speed"].found is Found.WRONG


def test_the_probe_writes_and_leaves_nothing(tmp_path: Path) -> None:
    assert durable_write_speed(tmp_path, 2 * 2**20) > 0
    assert list(tmp_path.iterdir()) == []


def test_the_command_says_all_of_it_and_exits_by_it(spec: HealthSpec, state: NvmlState, tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(
        json.dumps({"health": spec.model_dump(mode="json", include={"nvml_library", "state_dir", "sources"})})
    )
    state.set(0, "mig", 1)
    result = CliRunner().invoke(app, ["doctor", "--policy", str(policy), "--json"])
    assert result.exit_code == 1
    assert "MIG" in [check["name"] for check in json.loads(result.stdout)]


# tidegate health


def answer(silent: str = "") -> Answer:
    node = NodeId("a1" * 28)
    readings = (
        Reading(at_s=97.5, node=node, subject="GPU-1", signal=Signal.GPU_TEMPERATURE, value=61.0, status=Status.OK),
        Reading(
            at_s=99.0,
            node=node,
            subject="GPU-1",
            signal=Signal.GPU_POWER,
            value=None,
            status=Status.NO_PERMISSION,
            cause="NO_PERMISSION",
        ),
    )
    finding = Finding(at_s=40.0, subject=node, what="source:host", text="host has missed its deadline of 10 s")
    seen = Seen(
        node=node, at_s=100.0, readings=readings, findings=(finding,), verdicts=(), sources={"nvml": "", "host": "late"}
    )
    return Answer(node=node, name="gpu-box", seen=None if silent else seen, silent=silent)


def test_a_nodes_readings_have_their_age_and_what_is_missing_says_why() -> None:
    rows = as_rows(answer())
    power, temperature = rows["readings"]
    assert (temperature["value"], temperature["age_s"]) == (61.0, 2.5)
    assert (power["value"], power["status"], power["cause"]) == (None, "no_permission", "NO_PERMISSION")
    assert rows["findings"][0]["text"].startswith("host has missed")
    assert rows["sources"] == {"nvml": "", "host": "late"}


def test_the_views_hold_what_the_rows_hold(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    console = Console(width=160)
    for part in (*node_view(answer()), summary([answer(), answer("has no agent: run `tidegate up`")])):
        console.print(part)
    shown = capsys.readouterr().out
    for text in ("gpu_temperature_celsius", "61", "no_permission", "missed its deadline", "has no agent", "late"):
        assert text in shown


def test_a_node_is_chosen_by_the_beginning_of_its_name_or_id() -> None:
    names = {NodeId("abc1"): "box-1", NodeId("abd2"): "box-2"}
    assert choose(names, "") == ["abc1", "abd2"]
    assert choose(names, "abd") == choose(names, "box-2") == ["abd2"]
    for wanted in ("ab", "nobody"):
        with pytest.raises(UnknownNodeError, match="hint: nodes are box-1"):
            choose(names, wanted)


def test_ages_are_short_and_a_clock_that_was_set_back_makes_none_negative() -> None:
    """C190: what is compared is one machine's own readings with its own clock."""
    assert [age(seconds) for seconds in (-60.0, 3.2, 600.0, 8000.0)] == ["0 s", "3 s", "10 min", "2 h"]
