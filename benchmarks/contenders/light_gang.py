"""The gang of the flip: a Ray Train worker group whose workers make one small step, the same for every contender."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.train
from ray.train import RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from tidegate.gang.host import SETTINGS
from tidegate.gang.plan import Formation
from tidegate.gang.trainer import NodeTrainer

SIDE = 512


def first_step(settings: dict[str, Any]) -> None:
    """Ray Train's `train_loop_per_worker`: a step, and a file that says when it was done."""
    weights = np.random.default_rng(0).standard_normal((SIDE, SIDE))
    assert np.isfinite(weights @ weights).all()
    rank = ray.train.get_context().get_world_rank()
    (Path(settings["folder"]) / f"step-{rank}").write_text(str(time.time()), encoding="utf-8")


@ray.remote(num_cpus=0)
class Host:
    """Where our trainer's controller runs, as in `tidegate.gang.host`: its process starts while GPUs are awaited."""

    def __init__(self) -> None:
        os.environ.update(SETTINGS)

    async def lead(self, folder: Path, workers: int, group: str) -> float:
        """Start the gang in a placement group of one GPU a node; returns when its last worker had stepped."""
        # In a thread: Ray Train's workers call the actor that their controller runs in.
        return await asyncio.to_thread(self._lead, folder, workers, group)

    def _lead(self, folder: Path, workers: int, group: str) -> float:
        folder.mkdir(parents=True)
        formation = Formation(group=group, nodes=workers, gpus_per_node=1)
        NodeTrainer(first_step, {"folder": str(folder)}, folder / "ray_train", "gang", lambda: formation).fit()
        return _stepped_at_s(folder, workers)


def by_ray_train(folder: Path, workers: int, resource: str) -> float:
    """Start the gang as Ray Train does by itself, with one `resource` for each worker."""
    folder.mkdir(parents=True)
    DataParallelTrainer(
        first_step,
        train_loop_config={"folder": str(folder)},
        scaling_config=ScalingConfig(num_workers=workers, resources_per_worker={resource: 1}),
        run_config=RunConfig(name="gang", storage_path=str(folder / "ray_train")),
    ).fit()
    return _stepped_at_s(folder, workers)


def _stepped_at_s(folder: Path, workers: int) -> float:
    return max(float((folder / f"step-{rank}").read_text(encoding="utf-8")) for rank in range(workers))
