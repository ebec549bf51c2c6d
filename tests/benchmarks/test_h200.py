"""Benchmark h200 runs where there is no GPU and no Ray, at a size of no use; and its figures become metrics."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.loader import write_photos  # noqa: E402

from benchmarks import h200  # noqa: E402
from tidegate.data.prepare import prepare  # noqa: E402
from tidegate.testing import fake_nvml  # noqa: E402


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("h200")
    write_photos(folder / "images", 16, 8)
    prepare(folder / "images", folder / "data", seed=0, rows_per_shard=16)
    (folder / "without").mkdir()
    (folder / "without" / "ray.py").write_text("raise ImportError('not on this machine')\n")
    return folder


@pytest.mark.parametrize("part", h200.NAMES)
def test_each_part_runs_without_ray(inputs: Path, tmp_path: Path, part: str) -> None:
    (tmp_path / "data").symlink_to(inputs / "data")
    library = fake_nvml.build(tmp_path / "nvml")
    fake_nvml.NvmlState(tmp_path / "state", fake_nvml.gpus_of("node", 2))
    path = [inputs / "without", ROOT, ROOT / "platform"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.contenders.one_gpu", "--part", part, "--folder", tmp_path, "--size", "tiny"],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, path)),
            "OMP_NUM_THREADS": "1",
            "TIDEGATE_NVML_LIBRARY": str(library),
            fake_nvml.STATE_VARIABLE: str(tmp_path / "state"),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    assert all(figure > 0 for name, figure in figures.items() if name != "mfu")


def test_rounds_become_ratios() -> None:
    found = {
        "loop": [{"step_s": 0.19, "input_s": 0.01, "tflops": 400.0, "mfu": 0.41}],
        "written": [{"step_s": 0.2}],
        "stall": [{"copy_s": 0.05, "stall_s": 0.01, "idle_step_s": 0.2, "saving_step_s": 0.23}],
        "nvml": [{"read_s": 0.004, "longest_s": 0.1}],
    }
    metrics = h200.metrics_of(found, "on a GPU")
    assert {name: metric.ratio for name, metric in metrics.items()} == {
        "step_over_written": pytest.approx(1.0),
        "tflops": None,
        "mfu": None,
        "stall_over_pinned_copy": pytest.approx(0.2),
        "step_while_copying": pytest.approx(1.15),
        "nvml_read_s": None,
    }
    assert [name for name, metric in metrics.items() if not metric.holds] == ["step_while_copying"]
