"""jobs/prepare_data.py on a machine without a cluster."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from captioned import captioned_images
from tidegate.data.preparation import Preparation, Settings
from tidegate.processes import carriers
from waiting import wait_until

JOB = Path(__file__).parents[2] / "jobs" / "prepare_data.py"
MARK = "TIDEGATE_TEST_PREPARE"
IMAGES = 60


@pytest.mark.cluster
def test_killed_and_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL while parts are made takes the job's own Ray with it; started again it makes the rest, and the output is
    what one process makes without Ray, byte for byte. A third start finds it done; a bad image costs nobody else."""
    images, out, alone = captioned_images(tmp_path / "images", IMAGES), tmp_path / "out", tmp_path / "alone"
    (images / "001.png").write_bytes(b"no")
    monkeypatch.setenv(MARK, str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    options = {"seed": 5, "rows-per-part": 2, "rows-per-shard": 16, "side-min": 2}
    command = [sys.executable, str(JOB), "--images", str(images), "--out", str(out)]
    command += [text for name, value in options.items() for text in (f"--{name}", str(value))]
    parts = out / ".work" / "parts"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as first:
        wait_until(lambda: any(parts.glob("*.arrow")), 120, "the first part")
        first.kill()
    wait_until(lambda: not carriers(MARK, str(tmp_path)), 60, "the job's Ray is gone")
    there = {path.name: path.stat().st_mtime_ns for path in parts.glob("*.arrow")}
    assert not (out / "index.json").exists()

    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"{IMAGES // 2 - len(there)} parts made" in done.stdout
    assert (
        "59 images (59 of 4x4) in 4 shards, 1 rejected\n  rejected: 001.png: cannot identify image file" in done.stdout
    )
    wait_until(lambda: not carriers(MARK, str(tmp_path)), 60, "the job's Ray is gone")

    values = {name.replace("-", "_"): value for name, value in options.items()}
    preparation = Preparation(Settings.model_validate({**values, "source": str(images), "out": str(alone)}))
    for number, split in preparation.begin().items():
        for name, part in preparation.read(number, split):
            preparation.keep(name, part)
    for plan in preparation.plan():
        preparation.write_shard(plan)
    preparation.finish()
    assert {path.name: path.read_bytes() for path in out.iterdir()} == {
        path.name: path.read_bytes() for path in alone.iterdir()
    }
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 1
    assert "hint: remove it" in again.stderr
