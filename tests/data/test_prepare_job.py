"""jobs/prepare_data.py on a machine without a cluster, encoders and all; and submitted to a cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from test_encoders import LENGTH, prepared
from test_preparation import colourful, content, run, settings

from tidegate.data.preparation import Preparation
from tidegate.ports import free_port
from tidegate.processes import carriers
from tidegate.testing.local_cluster import LocalCluster, Ports
from tiny_pipeline import write_pipeline
from waiting import wait_until

JOB = Path(__file__).parents[2] / "jobs" / "prepare_data.py"
MARK = "TIDEGATE_TEST_PREPARE"
IMAGES = 24


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As the jobs compute: sums over more threads differ in their last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.cluster
@pytest.mark.usefixtures("one_thread")
def test_killed_and_started_again(tmp_path: Path) -> None:
    """SIGKILL while parts are made takes the job's own Ray with it; started again it makes the rest, and the output is
    what one process makes without Ray, byte for byte, latents and text states too. A third start finds it done; a bad
    image costs nobody else."""
    photos, out, pipeline = colourful(tmp_path / "photos", IMAGES), tmp_path / "out", write_pipeline(tmp_path / "pipe")
    (photos / "001.png").write_bytes(b"no")
    prepared(photos, tmp_path / "alone", pipeline)

    options = {"seed": 3, "rows-per-part": 4, "rows-per-shard": 7, "resolution": 32, "multiple": 8, "encode-batch": 3}
    options |= {"text-length": LENGTH, "pipeline": pipeline, "images": photos, "out": out}
    command = [sys.executable, str(JOB), "--latents", "--address", "local"]
    command += [text for name, value in options.items() for text in (f"--{name}", str(value))]
    environment = {**os.environ, MARK: str(tmp_path), "OMP_NUM_THREADS": "1"}
    parts = out / ".work" / "parts"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment) as first:
        wait_until(lambda: any(parts.glob("*.arrow")), 120, "the first part")
        first.kill()
    [left] = Path("/tmp").glob(f"tg-{first.pid}-*")
    wait_until(lambda: not carriers(MARK, str(tmp_path)), 30, "the job's Ray is gone")
    there = list(parts.glob("*.arrow"))
    assert not (out / "index.json").exists()

    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"{IMAGES // 4 - len(there)} parts made" in done.stdout
    assert "23 images (" in done.stdout
    assert ", 1 rejected\n  rejected: 001.png: cannot identify image file" in done.stdout
    assert content(out) == content(tmp_path / "alone")
    assert not left.exists(), "the next job clears what a killed one has left"
    wait_until(lambda: not carriers(MARK, str(tmp_path)), 60, "the job's Ray is gone")

    again = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert again.returncode == 1
    assert "is prepared already\nhint: remove it" in again.stderr


@pytest.mark.cluster
def test_submitted_to_a_cluster(tmp_path: Path) -> None:
    """As the README has it; the output is what one process makes without Ray."""
    photos, out = colourful(tmp_path / "photos", IMAGES), tmp_path / "out"
    alone = settings(photos, tmp_path / "alone", resolution=32)
    assert run(Preparation(alone)) is not None
    options = {"seed": 3, "rows-per-part": 4, "rows-per-shard": 7, "resolution": 32, "multiple": 8}
    options |= {"images": photos, "out": out}
    job = [sys.executable, str(JOB), *(text for name, value in options.items() for text in (f"--{name}", str(value)))]
    ports = Ports(gcs=free_port(), dashboard=free_port())
    with LocalCluster(
        ports=ports, gpus_per_node=(1,), head_cpus=2, node_cpus=2, environment={"OMP_NUM_THREADS": "1"}
    ) as cluster:
        done = subprocess.run(
            [Path(sys.executable).with_name("ray"), "job", "submit", "--", *job],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **cluster.client_environment()},
        )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "24 images (" in done.stdout
    assert content(out) == content(tmp_path / "alone")
