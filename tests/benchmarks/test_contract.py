"""The benchmarks' contract: contradictions are refused, losses are published, smoke tests are not kept."""

from __future__ import annotations

import importlib.util
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pydantic import ValidationError

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def contract() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_contract", ROOT / "benchmarks" / "contract.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # pydantic looks a class's annotations up in its module
    spec.loader.exec_module(module)
    return module


def result(contract: ModuleType, rounds: int = 5, **figures: Any) -> Any:
    metric = contract.figure([1.0], goal="<= 2")
    return contract.Result(
        name="probe",
        metrics={"seconds": metric},
        rounds=rounds,
        versions={"python": "3.11.0"},
        machine=contract.Machine(cpu="a cpu", cores=2, memory_bytes=1),
        at=datetime(2026, 1, 1, tzinfo=UTC),
        **figures,
    )


def test_the_ratio_is_the_median_of_the_rounds_ratios(contract: ModuleType) -> None:
    """Not the ratio of the medians, 4: one slow moment of the machine hits both sides of its round."""
    metric = contract.compared([1, 2, 10], [2, 8, 30], role="peer", ratio="theirs / ours", goal=">= 3.5")
    assert (metric.ours, metric.peer, metric.limit) == (2, 8, None)
    assert (metric.ratio, metric.ratio_min, metric.ratio_max) == (3, 2, 4)
    assert not metric.holds


def test_a_limit_is_what_ours_is_divided_by(contract: ModuleType) -> None:
    metric = contract.compared([3, 3], [2, 1], role="limit", ratio="ours / theirs", goal="<= 2.25")
    assert (metric.peer, metric.limit, metric.ratio) == (None, 1.5, 2.25)
    assert metric.holds


def test_a_plain_figure_has_no_ratio_and_its_goal_is_of_ours(contract: ModuleType) -> None:
    metric = contract.figure([0.5, 0.1, 0.2], goal="<= 0.2")
    assert (metric.ours, metric.ratio, metric.ratio_min, metric.holds) == (0.2, None, None, True)
    assert not contract.figure([0.3], goal="<= 0.2").holds


@pytest.mark.parametrize(("ours", "theirs"), [([], []), ([1.0], [1.0, 2.0])])
def test_each_round_needs_both_figures(contract: ModuleType, ours: list[float], theirs: list[float]) -> None:
    with pytest.raises(ValueError, match="one pair of figures a round"):
        contract.compared(ours, theirs, role="peer", ratio="theirs / ours", goal=">= 1")


@pytest.mark.parametrize("goal", ["5", "> 5", ">=5", ">= five", "at least 5", ">= -1", ">= 5x"])
def test_a_goal_that_says_no_direction_is_refused(contract: ModuleType, goal: str) -> None:
    with pytest.raises(ValueError, match="goal"):
        contract.figure([1.0], goal=goal)


@pytest.mark.parametrize(
    "wrong",
    [
        {"holds": False},
        {"ratio_min": None},
        {"peer": None},
        {"ratio": None, "ratio_min": None, "ratio_max": None},
        {"ours": float("nan")},
        {"hostname": "a"},
    ],
)
def test_a_metric_that_contradicts_itself_is_refused(contract: ModuleType, wrong: dict[str, object]) -> None:
    right = {"ours": 1.0, "peer": 6.0, "ratio": 6.0, "ratio_min": 5.0, "ratio_max": 7.0, "goal": ">= 5", "holds": True}
    contract.Metric(**right)
    with pytest.raises(ValidationError):
        contract.Metric(**(right | wrong))


def test_a_result_is_kept_as_the_object_that_is_printed(contract: ModuleType, tmp_path: Path) -> None:
    made = result(contract)
    path = contract.keep(made, tmp_path / "results")
    assert path == tmp_path / "results" / "probe.json"
    assert contract.Result.model_validate_json(path.read_text(encoding="utf-8")) == made
    kept = json.loads(path.read_text(encoding="utf-8"))
    assert set(kept) == {"name", "metrics", "rounds", "versions", "machine", "at"}
    assert {"ours", "peer", "limit", "ratio", "goal", "holds"} <= set(kept["metrics"]["seconds"])
    assert [file.name for file in path.parent.iterdir()] == ["probe.json"]


def test_a_smoke_test_does_not_replace_a_result(
    contract: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = contract.keep(result(contract), tmp_path)
    before = path.read_bytes()
    assert contract.keep(result(contract, rounds=contract.MIN_ROUNDS - 1), tmp_path) is None
    assert path.read_bytes() == before
    assert "not kept: 4 rounds" in capsys.readouterr().err


def test_the_machine_is_told_without_its_name(contract: ModuleType) -> None:
    machine = contract.this_machine()
    assert machine.cpu
    assert machine.cores >= 1
    assert machine.memory_bytes > 1 << 28
    assert set(machine.model_dump()) == {"cpu", "cores", "memory_bytes"}


def test_every_kept_result_is_valid(contract: ModuleType) -> None:
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        kept = contract.Result.model_validate_json(path.read_text(encoding="utf-8"))
        assert kept.name == path.stem
        assert kept.rounds >= contract.MIN_ROUNDS
