"""The proof that a run sees its data exactly once an epoch, whatever happens to it: real ranks, SIGKILL, other numbers
of ranks, batches of several shapes. Each rank writes down what it computed with."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from ranks import group, lines, losses
from torch import Tensor

from captioned import captioned_images, tiny_run
from tidegate.data.prepare import prepare
from tidegate.train.config import RunConfig
from tidegate.train.inputs import dataset_of
from tidegate.train.learning import Ready
from tidegate.train.loop import Run
from tidegate.train.parallel import joined
from tidegate.train.progress import NullProgress
from tidegate.train.records import Records
from tidegate.train.stages import stages
from waiting import wait_until

STEPS, BATCH, KILLED_AT = 14, 7, 9
CONFIG = tiny_run(
    steps=STEPS,
    image={"width": 4, "height": 4, "channels": 1, "patch": 2, "buckets": True},
    checkpoint={"every_steps": 4, "keep": 2},
)


class Watched(Run):
    """Writes down the ids of each batch with their places in the global batch; rank 1 is killed in one step."""

    kill_at: int | None

    def _loss(self, piece: Ready) -> Tensor:
        batch = piece.batch
        seen = self.run_dir / f"seen-{self.generation}-{self.world.rank}.jsonl"
        with seen.open("a") as file:
            row = {"step": self.step, "places": list(batch.positions), "ids": list(batch.ids), "size": str(batch.size)}
            file.write(json.dumps(row) + "\n")
        if self.world.rank == 1 and self.step == self.kill_at:
            committed = self.run_dir / "checkpoints" / "step-00000008.g0" / "manifest.json"
            wait_until(committed.exists, 20, "step 8 is on disk")
            os.kill(os.getpid(), signal.SIGKILL)
        return super()._loss(piece)


def watched(rank: int, config: RunConfig, data: Path, run_dir: Path, generation: int, kill_at: int | None) -> None:
    Watched.kill_at = kill_at
    datasets = [dataset_of(config, stage, data) for stage in stages(config)]
    with joined(30, config.parallel) as world:
        records = Records(
            run_dir,
            writes=rank == 0,
            world_size=world.size,
            generation=generation,
            log_every_steps=100,
            tensorboard=False,
        )
        with records:
            Watched(config, datasets, run_dir, NullProgress(), world, generation, records).go()


def global_batches(run_dir: Path) -> dict[int, list[int]]:
    """By step, what its ranks computed with, in the order of the global batch; of the generation that did it last."""
    parts: dict[int, dict[int, dict[int, int]]] = {}
    for path in run_dir.glob("seen-*.jsonl"):
        generation = int(path.stem.split("-")[1])
        for row in lines(run_dir, path.name):
            places = parts.setdefault(row["step"], {}).setdefault(generation, {})
            assert not places.keys() & set(row["places"]), "no place is computed twice in a generation"
            places.update(zip(row["places"], row["ids"], strict=True))
    newest = {step: found[max(found)] for step, found in sorted(parts.items())}
    return {step: [places[place] for place in range(BATCH)] for step, places in newest.items()}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """15 square images and 10 wide ones."""
    root = tmp_path_factory.mktemp("set")
    images = captioned_images(root / "images", 25)
    for number in range(0, 20, 2):
        Image.fromarray(np.full((4, 8), 12 * number, dtype=np.uint8)).save(images / f"{number:03d}.png")
    prepare(images, root / "data", seed=0, rows_per_shard=6)
    return root / "data"


@pytest.fixture(scope="module")
def undisturbed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("undisturbed")
    assert group(3, watched, CONFIG, data, run_dir, 0, None) == [0, 0, 0]
    return run_dir


def test_the_undisturbed_run_sees_whole_epochs(undisturbed: Path, data: Path) -> None:
    """C077: 14 batches of 7 from buckets of 15 and 10: each bucket's stream is made of whole epochs."""
    [stage] = stages(CONFIG)
    dataset = dataset_of(CONFIG, stage, data)
    seen = global_batches(undisturbed)
    assert seen == {step: dataset.ids(CONFIG.seed, step, BATCH).tolist() for step in range(STEPS)}
    starts = np.cumsum([0, *dataset.bucket_rows])
    for bucket, size in enumerate(dataset.bucket_rows):
        stream = [sample for ids in seen.values() for sample in ids if starts[bucket] <= sample < starts[bucket + 1]]
        assert len(stream) > 2 * size
        for epoch in range(2):
            whole = stream[epoch * size : (epoch + 1) * size]
            assert sorted(whole) == list(range(starts[bucket], starts[bucket + 1]))


@pytest.mark.parametrize("ranks", [3, 2, 1])
def test_killed_and_resumed_sees_the_same_global_batches_in_the_same_order(
    undisturbed: Path, data: Path, tmp_path: Path, ranks: int
) -> None:
    """C071, C075, C080: rank 1 of 3 gets SIGKILL in step 10, so many ranks go on from the checkpoint of step 8. With
    as many as before the losses are the undisturbed run's bit for bit; with others they differ by rounding."""
    codes = group(3, watched, CONFIG, data, tmp_path, 0, KILLED_AT)
    assert codes[1] == -signal.SIGKILL
    assert 0 not in codes
    assert group(ranks, watched, CONFIG, data, tmp_path, 1, None) == [0] * ranks
    [restored] = [line for line in lines(tmp_path, "events.jsonl") if line["kind"] == "restored"]
    assert restored["step"] == 8
    assert global_batches(tmp_path) == global_batches(undisturbed)
    if ranks == 3:
        assert losses(tmp_path) == losses(undisturbed)
        assert losses(tmp_path, "grad_norm") == losses(undisturbed, "grad_norm")
    else:
        assert losses(tmp_path) == pytest.approx(losses(undisturbed), rel=1e-4)
