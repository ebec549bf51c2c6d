"""Whether input keeps up with training, and what a sample costs.

* `over_step_rate`: batches a second of our loader (one thread, one rank), against four times the steps a second that
  the digits' loop makes in the same round;
* `cpu_over_datasets`: CPU of our loader for a sample of the digits, over all 400 steps of the demo's run, against
  `datasets` and torch's DataLoader over the same shards. Ours decodes the images in its first epoch; the peer's
  cheapest way has decoded them before it is measured;
* `cpu_over_datasets_jpeg`: the same for JPEGs of 256 x 256 that no cache holds, so that both decode every time.

The peer runs in a venv of its own (`benchmarks/peers/datasets`), in each way that it has; in each round its cheapest
counts. Takes about six minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml
from benchmarks.contract import Metric, compared, publish
from benchmarks.peers.venv import python_of
from PIL import Image

from tidegate.cli.demo.digits import write_images
from tidegate.data.prepare import prepare

ROOT = Path(__file__).parents[1]
WAYS = ("decode", "workers", "arrays")
STEPS_OF_LOOP = 60
WARM_UP_STEPS = 20
KEEPS_UP = 4
"""Input shall be so many times as fast as the steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The same for every contender."""

    shards: Path
    side: int
    channels: int
    batch: int
    steps: int
    cache_bytes: int
    """Of ours; 1 keeps no image decoded."""
    ways: tuple[str, ...]
    """Of the peer."""


Figures = dict[str, list[float]]
"""What was measured -> one figure for each round."""


def tasks(folder: Path) -> Mapping[str, Task]:
    write_images(folder / "digits-images")
    write_photos(folder / "photo-images", 512, 256)
    for name in ("digits", "photo"):
        prepare(folder / f"{name}-images", folder / name, seed=0, rows_per_shard=100_000)
    return {
        "digits": Task(
            shards=folder / "digits", side=8, channels=1, batch=64, steps=400, cache_bytes=256 << 20, ways=WAYS
        ),
        # Numbers of all pixels would be the cache that this task is to do without.
        "jpeg": Task(
            shards=folder / "photo", side=256, channels=3, batch=32, steps=48, cache_bytes=1, ways=("decode", "workers")
        ),
    }


def write_photos(folder: Path, count: int, side: int) -> None:
    """JPEGs with as much detail as a photograph: coarse noise, enlarged, and a little fine noise on it."""
    folder.mkdir()
    random, lines = np.random.default_rng(0), []
    for number in range(count):
        coarse = Image.fromarray(random.integers(0, 255, (24, 24, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((side, side), Image.Resampling.BICUBIC), dtype=np.int16)
        noisy = np.clip(smooth + random.normal(0, 6, smooth.shape), 0, 255).astype(np.uint8)
        Image.fromarray(noisy).save(folder / f"{number:04d}.jpg", quality=90)
        lines.append(json.dumps({"file_name": f"{number:04d}.jpg", "text": f"a photograph, number {number}"}))
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def measure(folder: Path, rounds: int) -> Figures:
    found: Figures = defaultdict(list)
    all_tasks, peer = tasks(folder), python_of("datasets")
    for number in range(rounds + 1):
        now = play(all_tasks, peer, folder / f"round {number}")
        shown = ", ".join(f"{name} {value:.4g}" for name, value in now.items())
        print(f"round {number or 'warm-up'}: {shown}", flush=True)
        for name, value in now.items() if number else ():
            found[name].append(value)
    return found


def play(all_tasks: Mapping[str, Task], peer: Path, folder: Path) -> dict[str, float]:
    """Every contender once; microseconds of CPU a sample, batches and steps a second."""
    now = {}
    for name, task in all_tasks.items():
        ours = ours_of(task)
        now[f"{name} ours"] = 1e6 * ours["cpu_s"] / ours["samples"]
        for way in task.ways:
            theirs = theirs_of(task, way, peer, folder)
            now[f"{name} {way}"] = 1e6 * theirs["cpu_s"] / theirs["samples"]
        if name == "digits":
            now["batches_per_s"] = task.steps / ours["wall_s"]
            now["steps_per_s"] = steps_per_s(task, folder)
    return now


def ours_of(task: Task) -> dict[str, float]:
    options = ["--side", str(task.side), "--cache-bytes", str(task.cache_bytes)]
    command = [sys.executable, "-m", "benchmarks.contenders.read_shards", *options, *_same(task)]
    return _told([*command, "--shards", str(task.shards)], {})


def theirs_of(task: Task, way: str, python: Path, folder: Path) -> dict[str, float]:
    command = [str(python), str(ROOT / "benchmarks/peers/datasets/read.py"), "--way", way, *_same(task)]
    # Nothing is fetched, and each round's cache is its own.
    alone = {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "PYTHONPATH": ""}
    return _told([*command, "--shards", f"{task.shards}/*.parquet"], alone)


def steps_per_s(task: Task, folder: Path) -> float:
    """Of the digits' loop, one rank; the median step."""
    config = yaml.safe_load((ROOT / "jobs/configs/digits.yaml").read_text(encoding="utf-8"))
    config |= {"steps": STEPS_OF_LOOP, "checkpoint": {"every_steps": STEPS_OF_LOOP}}
    config["optimizer"] |= {"warmup_steps": 1, "decay_steps": 1}
    folder.mkdir(exist_ok=True)
    path = folder / "digits.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    command = [sys.executable, "-m", "tidegate.train", "--config", str(path)]
    subprocess.run(
        [*command, "--data", str(task.shards), "--run-dir", str(folder / "run")],
        check=True,
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return 1 / statistics.median(row["step_s"] for row in rows[WARM_UP_STEPS:])


def _same(task: Task) -> list[str]:
    options = {"channels": task.channels, "batch": task.batch, "steps": task.steps}
    return [text for name, value in options.items() for text in (f"--{name}", str(value))]


def _told(command: Sequence[str], environment: Mapping[str, str]) -> dict[str, float]:
    """A contender's last line."""
    done = subprocess.run(
        command,
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    told: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return told


def metrics_of(found: Mapping[str, Sequence[float]]) -> dict[str, Metric]:
    four_steps = [KEEPS_UP * rate for rate in found["steps_per_s"]]
    keeps_up = compared(found["batches_per_s"], four_steps, role="limit", ratio="ours / theirs", goal=">= 1")
    metrics = {"over_step_rate": keeps_up}
    for task, metric in (("digits", "cpu_over_datasets"), ("jpeg", "cpu_over_datasets_jpeg")):
        ways = [found[name] for name in found if name.startswith(f"{task} ") and name != f"{task} ours"]
        cheapest = [min(costs) for costs in zip(*ways, strict=True)]
        metrics[metric] = compared(found[f"{task} ours"], cheapest, role="peer", ratio="ours / theirs", goal="<= 1")
    return metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="after one of warm-up")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-") as folder:
        metrics = metrics_of(measure(Path(folder), arguments.rounds))
    publish("loader", metrics, rounds=arguments.rounds, packages=("tidegate", "torch", "pyarrow", "pillow", "numpy"))


if __name__ == "__main__":
    main()
