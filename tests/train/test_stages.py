"""A plan of stages: small images first, then larger ones, the weights carried over."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from ranks import group, lines, losses, train

from captioned import captioned_images, tiny_run
from tidegate.checkpoint.restore import Checkpoint, full_model_weights, newest_good, verified
from tidegate.data.order import order
from tidegate.data.prepare import prepare
from tidegate.errors import DataError
from tidegate.gang.hang import PACE_STEPS, phase_limit_s
from tidegate.spec.policy import GangSpec
from tidegate.train.config import RunConfig
from tidegate.train.export import load_export
from tidegate.train.export_manifest import export_id
from tidegate.train.loop import run
from tidegate.train.progress import NullProgress, Phase
from tidegate.train.stages import stage_at, stages

FIRST = {"name": "small", "steps": 5, "width": 4, "height": 4, "data": "4"}
SECOND = {"name": "large", "steps": 7, "global_batch": 5, "shift": 2.0, "activation_checkpointing": "full", "data": "8"}


def staged(**changes: object) -> RunConfig:
    image = {"width": 8, "height": 8, "channels": 1, "patch": 2}
    values: dict[str, object] = {"image": image, "stages": (FIRST, {**SECOND, "precision": "bfloat16"})}
    return tiny_run(**{**values, "checkpoint": {"every_steps": 3, "keep": 9}, **changes})


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("set")
    for side in (4, 8):
        prepare(
            captioned_images(root / f"images{side}", 25, side), root / "data" / str(side), seed=0, rows_per_shard=10
        )
    return root / "data"


@pytest.fixture(scope="module")
def unbroken(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("unbroken")
    assert group(2, train, staged(), data, run_dir, 0, {}) == [0, 0]
    return run_dir


def test_a_plan() -> None:
    config = staged()
    first, second = stages(config)
    assert (first.begins, first.ends, second.begins, second.ends) == (0, 5, 5, 12)
    assert (first.image.tokens, second.image.tokens) == (4, 16)
    assert (first.global_batch, second.global_batch) == (7, 5)
    assert (first.shift, second.shift) == (1.0, 2.0)
    assert (first.precision, second.precision) == ("float32", "bfloat16")
    assert [stage_at((first, second), step).name for step in (0, 4, 5, 11, 12)] == ["small"] * 2 + ["large"] * 3
    assert first.data_seed(1) != second.data_seed(1)


def test_a_run_without_stages_is_one() -> None:
    config = tiny_run()
    [stage] = stages(config)
    assert (stage.begins, stage.ends, stage.data) == (0, 12, "")
    assert (stage.image, stage.global_batch) == (config.image, config.global_batch)
    assert stage.data_seed(config.seed) == config.seed, "its samples come in the order they always did"


def test_weights_and_steps_go_on_over_a_stage_s_end(unbroken: Path) -> None:
    assert list(losses(unbroken)) == list(range(1, 13))
    told = [line for line in lines(unbroken, "events.jsonl") if line["kind"] == "stage"]
    assert [(line["step"], line["name"]) for line in told] == [(5, "large")]
    committed = [line["step"] for line in lines(unbroken, "checkpoints.jsonl")]
    assert committed == [3, 5, 6, 9, 12], "a stage's end is saved too"
    manifests = {step: verified(unbroken / "checkpoints" / f"step-{step:08d}.g0") for step in committed}
    assert {step: manifest.updates for step, manifest in manifests.items()} == {step: step for step in committed}
    assert [manifests[step].global_batch for step in committed] == [7, 7, 5, 5, 5]
    assert manifests[5].dataset != manifests[6].dataset
    # One step at a small rate: the weights of step 6 are near those of step 5, not fresh ones.
    before, after = (
        full_model_weights(Checkpoint(unbroken / "checkpoints" / f"step-{step:08d}.g0", manifests[step]))
        for step in (5, 6)
    )
    change = max(float((after[name] - before[name]).abs().max()) for name in before)
    assert 0 < change < 0.02
    assert load_export(unbroken / "export")[1].image.width == 8


@pytest.mark.parametrize("dies_at_commit", [3, 5, 6, 9])
def test_killed_in_any_stage_it_goes_on_bit_for_bit(
    dies_at_commit: int, unbroken: Path, data: Path, tmp_path: Path
) -> None:
    """C087: moments, rates and the data's position are the stage's own."""
    assert group(2, train, staged(), data, tmp_path, 0, {0: {"dies_at_commit": dies_at_commit}})[0] == 9
    assert group(2, train, staged(), data, tmp_path, 1, {}) == [0, 0]
    restored = next(line["step"] for line in lines(tmp_path, "events.jsonl") if line["kind"] == "restored")
    assert restored == dies_at_commit
    assert losses(tmp_path) == losses(unbroken)
    assert export_id(tmp_path / "export") == export_id(unbroken / "export")
    assert not [line for line in lines(tmp_path, "events.jsonl") if line["kind"] == "resumed_differently"]


def test_carried_over_at_once_or_through_a_checkpoint_is_the_same(unbroken: Path, data: Path, tmp_path: Path) -> None:
    """From the checkpoint at the stage's end alone."""
    shutil.copytree(unbroken / "checkpoints" / "step-00000005.g0", tmp_path / "checkpoints" / "step-00000005.g0")
    assert group(2, train, staged(), data, tmp_path, 1, {}) == [0, 0]
    assert losses(tmp_path) == {step: loss for step, loss in losses(unbroken).items() if step > 5}


def test_a_save_that_fails_at_a_stage_s_end_loses_nothing(unbroken: Path, data: Path, tmp_path: Path) -> None:
    """Weights are carried in memory: all saves of the first stage fail, and the second begins where it ended."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("in the way")
    with pytest.raises(Exception, match="the last save, of step 12, failed"):
        run(staged(), data, tmp_path / "run", NullProgress())
    assert losses(tmp_path / "run") == pytest.approx(losses(unbroken), rel=0.02)


def test_samples_of_a_skipped_step_are_the_stage_s(data: Path, tmp_path: Path) -> None:
    """What an event lists is what the stage's own order gives. The first step of a stage is never a spike, whatever its
    loss: it is another one."""
    guard = {"spike_factor": 1.0001, "spike_window_steps": 1, "rollbacks_max": 99}
    config = staged(stages=(FIRST, SECOND), guard=guard, checkpoint={"every_steps": 1, "keep": 9})
    run(config, data, tmp_path, NullProgress())
    rolled = [line for line in lines(tmp_path, "events.jsonl") if line["kind"] == "rolled_back"]
    assert any(line["step"] > 5 for line in rolled)
    for line in rolled:
        stage = stage_at(stages(config), line["step"] - 1)
        wanted = order(stage.data_seed(config.seed), line["step"] - 1 - stage.begins, stage.global_batch, 25)
        assert line["samples"] == wanted.tolist()
        assert line["step"] != 6


class Seen(NullProgress):
    def __init__(self) -> None:
        self.now = Phase.STARTING
        self.warm_steps: list[int] = []

    def phase(self, phase: Phase) -> None:
        self.now = phase

    def stepped(self, step: int, loss: float) -> None:
        if self.now is Phase.WARMING:
            self.warm_steps.append(step)


def test_a_stage_s_first_steps_are_not_measured_by_the_one_before(data: Path, tmp_path: Path) -> None:
    """They compile, and take longer for good: a hang's limit is drawn from the pace, which must be learnt first. Saves
    in between change nothing."""
    seen = Seen()
    plan = ({**FIRST, "steps": 6}, {**SECOND, "steps": 14})
    run(staged(steps=20, stages=plan, checkpoint={"every_steps": 4, "keep": 9}), data, tmp_path, seen)
    assert seen.warm_steps == [1, 2, *range(7, 18)]
    assert PACE_STEPS // 2 < 11
    assert phase_limit_s(Phase.WARMING, (0.1,), GangSpec(start_deadline_s=77.0)) == 77.0


def test_every_stage_s_data_is_there_before_the_first_step(data: Path, tmp_path: Path) -> None:
    config = staged(stages=({**FIRST, "steps": 5}, {**SECOND, "data": "elsewhere"}))
    with pytest.raises(DataError, match="elsewhere"):
        run(config, data, tmp_path / "a", NullProgress())
    with pytest.raises(DataError, match="images must be 8x8, has 25 of 4x4"):
        run(staged(stages=(FIRST, {**SECOND, "data": "4"})), data, tmp_path / "b", NullProgress())
    assert newest_good(tmp_path / "a" / "checkpoints").checkpoint is None


def test_a_plan_of_other_ranks_goes_on_within_rounding(unbroken: Path, data: Path, tmp_path: Path) -> None:
    """Three ranks do the first stage, one the second."""
    codes = group(3, train, staged(), data, tmp_path, 0, {rank: {"stops_at": 5} for rank in range(3)})
    assert codes == [0, 0, 0]
    run(staged(), data, tmp_path, NullProgress(), generation=1)
    assert losses(tmp_path) == pytest.approx(losses(unbroken), rel=0.02)
    assert torch.isfinite(torch.tensor(list(losses(tmp_path).values()))).all()
