"""The mean of checkpoints' weights (PMA), by hand and by the job."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from pathlib import Path

import pytest
import torch
import yaml
from ranks import group, train

from captioned import captioned_images, tiny_run
from tidegate.checkpoint.manifest import MANIFEST
from tidegate.checkpoint.restore import full_model_weights
from tidegate.data.prepare import prepare
from tidegate.errors import CheckpointError
from tidegate.train.averaging import mean_weights, named, newest
from tidegate.train.export import load_export

JOB = Path(__file__).parents[2] / "jobs" / "average_checkpoints.py"
CONFIG = tiny_run(checkpoint={"every_steps": 3, "keep": 9})


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks with checkpoints of steps 3, 6, 9 and 12; that of step 9 has lost its manifest."""
    root = tmp_path_factory.mktemp("run")
    prepare(captioned_images(root / "images", 25), root / "data", seed=0, rows_per_shard=10)
    assert group(2, train, CONFIG, root / "data", root / "run", 0, {}) == [0, 0]
    (root / "run" / "checkpoints" / "step-00000009.g0" / MANIFEST).unlink()
    (root / "run.yaml").write_text(yaml.safe_dump(CONFIG.model_dump(mode="json")))
    return root / "run"


def job(*arguments: str) -> tuple[int, str]:
    before, sys.argv = sys.argv, ["average_checkpoints.py", *arguments]
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            runpy.run_path(str(JOB), run_name="__main__")
    except SystemExit as ended:
        return int(ended.code or 0), said.getvalue()
    finally:
        sys.argv = before
    return 0, said.getvalue()


def test_the_mean_of_the_newest_good_ones(run_dir: Path) -> None:
    chosen, skipped = newest(run_dir / "checkpoints", 3)
    assert [checkpoint.manifest.step for checkpoint in chosen] == [3, 6, 12]
    assert [str(line) for line in skipped] == ["step-00000009.g0: never committed: no manifest"]
    each = [full_model_weights(checkpoint) for checkpoint in chosen]
    mean = mean_weights(chosen)
    assert mean.keys() == each[0].keys()
    for name, tensor in mean.items():
        assert torch.allclose(tensor, torch.stack([weights[name] for weights in each]).mean(dim=0), atol=1e-6), name


def test_equal_weights_stay_what_they_are(run_dir: Path) -> None:
    [checkpoint], _ = newest(run_dir / "checkpoints", 1)
    mean = mean_weights([checkpoint] * 3)
    assert all(torch.equal(mean[name], tensor) for name, tensor in full_model_weights(checkpoint).items())


def test_too_few_or_a_torn_one_is_an_error(run_dir: Path) -> None:
    with pytest.raises(CheckpointError, match="3 good checkpoints, asked for 4\nhint: ask for fewer"):
        newest(run_dir / "checkpoints", 4)
    with pytest.raises(CheckpointError, match=r"step-00000009\.g0: never committed"):
        named(run_dir / "checkpoints", ["step-00000012.g0", "step-00000009.g0"])


def test_the_job_writes_an_export(run_dir: Path, tmp_path: Path) -> None:
    usual = ["--config", str(run_dir.parent / "run.yaml"), "--run-dir", str(run_dir), "--out", str(tmp_path / "pma")]
    code, said = job(*usual, "--last", "2")
    assert (code, "skipped step-00000009.g0" in said) == (0, True)
    assert "tiny, the mean of steps 6, 12, export " in said
    network, _ = load_export(tmp_path / "pma")
    mean = mean_weights(named(run_dir / "checkpoints", ["step-00000006.g0", "step-00000012.g0"]))
    assert all(torch.equal(tensor, mean[name]) for name, tensor in network.state_dict().items())

    code, said = job(*usual, "--checkpoint", "step-00000003.g0")
    assert (code, "the mean of steps 3, export" in said) == (0, True)
    code, said = job(*usual, "--last", "9")
    assert (code, said.splitlines()[-1]) == (1, "hint: ask for fewer")
    assert job(*usual, "--last", "0")[0] == 2
