"""The step that the gang of the flip makes. Apart from what starts a gang, so that workers import only this."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray

SIDE = 512


def first_step(settings: dict[str, Any]) -> None:
    """Ray Train's `train_loop_per_worker`: a step, and a file in `settings["folder"]` that says when it was done."""
    weights = np.random.default_rng(0).standard_normal((SIDE, SIDE))
    assert np.isfinite(weights @ weights).all()
    at_s = time.time()
    half = Path(settings["folder"]) / f"half-{os.getpid()}"
    half.write_text(str(at_s), encoding="utf-8")
    half.rename(half.with_name(f"step-{os.getpid()}"))


@ray.remote(num_cpus=0, num_gpus=1)
class Stepper:
    """A worker with nothing around it."""

    def step(self, settings: dict[str, Any]) -> None:
        first_step(settings)


def stepped_at_s(folder: Path, workers: int) -> float:
    """When the last of the gang's workers had made its step.

    Raises:
        RuntimeError: another number of workers has.
    """
    found = [float(path.read_text(encoding="utf-8")) for path in folder.glob("step-*")]
    if len(found) != workers:
        raise RuntimeError(f"{len(found)} workers made a step, not {workers}")
    return max(found)
