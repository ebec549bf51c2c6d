"""The benchmarks' pure parts: fits, ratios, the table, what a round's figures become, a fleet of any size at rest."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.contenders import turns  # noqa: E402
from benchmarks.contenders.flip_turns import Took  # noqa: E402
from benchmarks.contract import Machine, Metric, Result, compared, figure, growth_exponent  # noqa: E402

from benchmarks import big_fleet, decide, fault_to_step, flip, loader, run, steady_tax  # noqa: E402
from tidegate.arbiter.book import ClaimState  # noqa: E402
from tidegate.ids import Tier  # noqa: E402

# --- fits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("power", [0.0, 1.0, 1.5, 2.0])
def test_the_exponent_of_a_power_is_found_whatever_its_factor(power: float) -> None:
    sizes = [1000, 2000, 4000, 12_500]
    assert growth_exponent(sizes, [3e-7 * size**power for size in sizes]) == pytest.approx(power)


def test_one_slow_size_does_not_make_the_exponent() -> None:
    sizes = [1000, 2000, 4000, 8000, 16_000]
    values = [float(size) for size in sizes]
    values[2] *= 1.5
    assert growth_exponent(sizes, values) == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize(("sizes", "values"), [([1, 2], [1.0]), ([1, 2], [1.0, 0.0]), ([5, 5], [1.0, 2.0]), ([1], [1])])
def test_an_exponent_needs_two_sizes_and_figures_above_zero(sizes: list[float], values: list[float]) -> None:
    with pytest.raises(ValueError):
        growth_exponent(sizes, values)


# --- the table --------------------------------------------------------------------------------------------------


def result(name: str, **metrics: Metric) -> Result:
    return Result(
        name=name,
        metrics=metrics,
        rounds=5,
        versions={},
        machine=Machine(cpu="a cpu", cores=2, memory_bytes=1),
        at=datetime(2026, 1, 1, tzinfo=UTC),
    )


def test_the_table_shows_every_metric_with_its_goal_and_whether_it_holds() -> None:
    peer = compared([2.0, 2.0], [8.0, 12.0], role="peer", ratio="theirs / ours", goal=">= 10")
    floor = compared([3.0], [2.0], role="limit", ratio="ours / theirs", goal="<= 1.5")
    plain = figure([0.0], goal="<= 0", note="nobody to compare with")
    results = [result("one", peer=peer, floor=floor), result("two", plain=plain)]
    out = StringIO()
    Console(file=out, width=200).print(run.table(results))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.getvalue().splitlines() if "│" in line]
    assert rows == [
        ["one", "peer", "2", "10", "", "5.00 (4.00-6.00)", ">= 10", "no"],
        ["one", "floor", "3", "", "2", "1.50 (1.50-1.50)", "<= 1.5", "yes"],
        ["two", "plain", "0", "", "", "", "<= 0", "yes"],
    ]
    assert run.notes(results) == ["two plain: nobody to compare with"]


# --- decide -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fleet() -> big_fleet.Fleet:
    return big_fleet.build(200)


def test_a_fleet_at_rest_has_pools_on_every_node_claims_in_all_states_and_quarantines(fleet: big_fleet.Fleet) -> None:
    assert len(fleet.view.nodes) == len(fleet.view.pools) == len(fleet.view.health) == 200
    assert {claim.state for claim in fleet.book.claims.values()} == set(ClaimState)
    assert {quarantine.verdict.tier for quarantine in fleet.book.quarantines.values()} == {Tier.SERVE, Tier.NONE}


@pytest.mark.parametrize("tick", decide.TICKS)
def test_the_two_ticks_decide_what_they_are_measured_for(fleet: big_fleet.Fleet, tick: str) -> None:
    """`seconds` raises when a quiet tick moves something or the placing one places another claim."""
    assert 0 < decide.seconds(fleet, tick) < 5
    assert decide.peak_bytes(fleet, tick) > 0


def test_a_decision_that_was_not_meant_is_not_measured(fleet: big_fleet.Fleet) -> None:
    meant = decide.decide(fleet.book, fleet.look(), big_fleet.POLICY, big_fleet.NOW_S)
    with pytest.raises(RuntimeError, match="the placing tick placed"):
        decide.check(fleet, "placing", meant)


# --- flip -------------------------------------------------------------------------------------------------------


def test_the_flip_compares_with_the_best_peer_the_default_and_the_floor() -> None:
    def took(gpus_s: float, step_s: float) -> list[Took]:
        return [Took(gpus_s=gpus_s, step_s=step_s)] * 5

    found = {
        "idle": {"ours": took(1, 2), "floor": took(0.5, 1.6), "default": took(4, 6), "tuned": took(2, 3)},
        "busy": {"ours": took(2, 4), "default": took(8, 10), "tuned": took(6, 8)},
    }
    metrics = flip.metrics_of(found, {"ours": [], "default": ["status 500"], "tuned": []})
    assert {name: metric.ratio for name, metric in metrics.items()} == {
        "idle": 1.5,
        "idle_over_default": 3,
        "idle_over_floor": 1.25,
        "idle_gpus": 2,
        "idle_gpus_over_default": 4,
        "idle_gpus_over_floor": 2,
        "busy": 2,
        "busy_over_default": 2.5,
        "busy_gpus": 3,
        "busy_gpus_over_default": 4,
        "failed_requests": None,
    }
    assert [name for name, metric in metrics.items() if not metric.holds] == [
        "idle_gpus_over_floor",
        "busy_over_default",
    ]
    assert metrics["failed_requests"].ours == 0, "a peer's failures are its own"
    assert not flip.metrics_of(found, {"ours": ["status 502"]})["failed_requests"].holds


# --- fault_to_step ----------------------------------------------------------------------------------------------


def run_dir(folder: Path, *steps: tuple[int, int, int, float]) -> Path:
    """`steps`: generation, step, world size, loss."""
    keys = ("generation", "step", "world_size", "loss")
    lines = [json.dumps(dict(zip(keys, step, strict=True))) for step in steps]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, '{"half a li']), encoding="utf-8")
    return folder


def test_lost_steps_are_those_done_again(tmp_path: Path) -> None:
    four = turns.RANKS
    run = run_dir(tmp_path, (1, 19, four, 0.5), (1, 20, four, 0.4), (2, 18, four, 0.6), (3, 19, four, 0.5))
    assert turns.steps_lost(run) == [3, 0]


def test_losses_are_compared_at_the_whole_world_size_only(tmp_path: Path) -> None:
    run = run_dir(tmp_path, (1, 1, turns.RANKS, 0.5), (2, 2, turns.RANKS - 1, 0.4), (3, 2, turns.RANKS, 0.3))
    assert turns.losses(run) == [(1, 0.5), (2, 0.3)]


def found(run: Path) -> fault_to_step.Found:
    found = fault_to_step.Found(runs=[run])
    figures = {
        "rank_kill": {"ours": 1.2, "default": 20.0, "tuned": 15.0, "torchrun": 6.0, "floor": 0.8},
        "rank_hang": {"ours": 6.0, "tuned": 30.0, "torchrun": 18.0},
        "node_kill": {"ours": 9.0, "tuned": 18.0},
        "controller_kill": {"ours": 7.0},
    }
    for fault, seconds in figures.items():
        for contender, took_s in seconds.items():
            found.seconds[fault, contender] = [took_s] * 5
    return found


def test_faults_are_compared_with_the_best_of_ray_train_torchrun_and_the_floor(tmp_path: Path) -> None:
    run = run_dir(tmp_path, (1, 20, turns.RANKS, 0.5), (2, 11, turns.RANKS, 0.5))
    metrics = fault_to_step.metrics_of(found(run))
    ratios = {name: metric.ratio for name, metric in metrics.items() if metric.ratio is not None}
    assert ratios == pytest.approx(
        {
            "rank_kill": 12.5,
            "rank_kill_over_default": 20 / 1.2,
            "rank_kill_over_torchrun": 5,
            "rank_kill_over_floor": 1.5,
            "rank_hang": 5,
            "rank_hang_over_torchrun": 3,
            "node_kill": 2,
        }
    )
    assert all(metric.holds for metric in metrics.values())
    assert metrics["steps_lost"].ours == 10
    assert metrics["controller_kill"].peer is None
    assert metrics["controller_kill"].note == fault_to_step.NO_PEER


def test_a_step_too_many_and_a_wrong_loss_are_published_as_losses(tmp_path: Path) -> None:
    measured = found(run_dir(tmp_path, (1, 20, turns.RANKS, 0.5), (2, 10, turns.RANKS, 0.5)))
    measured.mismatches = 1
    metrics = fault_to_step.metrics_of(measured)
    assert [name for name, metric in metrics.items() if not metric.holds] == ["steps_lost", "loss_mismatches"]


# --- loader -----------------------------------------------------------------------------------------------------


def test_the_loader_is_held_against_the_peers_cheapest_way_of_each_round() -> None:
    found = {
        "batches_per_s": [100.0, 100.0, 100.0],
        "steps_per_s": [10.0, 30.0, 20.0],
        "digits ours": [6.0, 6.0, 6.0],
        "digits decode": [70.0, 5.0, 70.0],
        "digits arrays": [12.0, 12.0, 12.0],
        "jpeg ours": [11.0, 11.0, 11.0],
        "jpeg decode": [10.0, 10.0, 10.0],
    }
    metrics = loader.metrics_of(found)
    assert metrics["over_step_rate"].ratio == pytest.approx(100 / 80)
    assert metrics["over_step_rate"].holds
    assert (metrics["cpu_over_datasets"].ratio, metrics["cpu_over_datasets"].ratio_max) == (0.5, 1.2)
    assert not metrics["cpu_over_datasets_jpeg"].holds


# --- steady_tax -------------------------------------------------------------------------------------------------


def test_the_tax_is_the_pace_over_each_peers() -> None:
    found = steady_tax.metrics_of(
        {"ours": [0.102, 0.1, 0.3], "torchrun": [0.1, 0.1, 0.1], "ray_train": [0.1, 0.2, 0.3]}
    )
    assert found["step_over_torchrun"].ratio == pytest.approx(1.02)
    assert found["step_over_torchrun"].holds
    assert found["step_over_ray_train"].ratio == pytest.approx(1.0)


def test_a_pace_counts_what_came_between_and_wants_each_step_once(tmp_path: Path) -> None:
    def write(*steps: int) -> None:
        lines = [json.dumps({"step": step, "at_s": 10.0 + at}) for at, step in enumerate(steps)]
        (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")

    write(1, 2, 3, 4, 5)
    assert turns.pace_s(tmp_path, 2, 4) == pytest.approx(1.0)
    write(1, 2, 3, 2, 3, 4)
    with pytest.raises(turns.TurnError, match="each done once"):
        turns.pace_s(tmp_path, 2, 4)
