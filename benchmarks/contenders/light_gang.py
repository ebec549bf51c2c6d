"""The gang of the flip: a Ray Train worker group whose workers make one small step, the same for every contender."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import ray
from benchmarks.contenders.first_step import first_step, stepped_at_s

from tidegate.gang.host import SETTINGS, import_trainer, start_early
from tidegate.gang.plan import Formation


@ray.remote(num_cpus=0)
class Host:
    """Where our trainer's controller runs, as in `tidegate.gang.host`: its process starts while GPUs are awaited, and
    its workers start before Ray Train is imported."""

    def __init__(self) -> None:
        os.environ.update(SETTINGS)
        self._workers_run = threading.Event()
        self._trainer = import_trainer(self._workers_run)

    async def lead(self, folder: Path, workers: int, group: str) -> float:
        """Start the gang in a placement group of one GPU a node; returns when its last worker had stepped."""
        # In a thread, as there: the controller has an event loop of its own.
        return await asyncio.to_thread(self._lead, folder, workers, group)

    def _lead(self, folder: Path, workers: int, group: str) -> float:
        folder.mkdir(parents=True)
        formation = Formation(group=group, nodes=workers, gpus_per_node=1)
        settings = {"folder": str(folder)}
        early = start_early(lambda: formation, first_step, settings, self._workers_run)
        self._trainer.result()(first_step, settings, folder / "ray_train", "gang", lambda: formation, early).fit()
        return stepped_at_s(folder, workers)


def by_ray_train(folder: Path, workers: int, resource: str) -> float:
    """Start the gang as Ray Train does by itself, with one `resource` for each worker."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    folder.mkdir(parents=True)
    DataParallelTrainer(
        first_step,
        train_loop_config={"folder": str(folder)},
        scaling_config=ScalingConfig(num_workers=workers, resources_per_worker={resource: 1}),
        run_config=RunConfig(name="gang", storage_path=str(folder / "ray_train")),
    ).fit()
    return stepped_at_s(folder, workers)
