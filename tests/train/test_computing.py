"""A slow rank is told from those that wait for it: real ranks, real gloo, one whose blocks take longer."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from ranks import group

from captioned import captioned_images, tiny_run
from tidegate.data.prepare import prepare
from tidegate.train.config import RunConfig
from tidegate.train.loop import run
from tidegate.train.progress import NullProgress

SLEEP_S = 0.02
BLOCKS = 2


class Notes(NullProgress):
    def __init__(self) -> None:
        self.compute_s: list[float] = []

    def computed(self, seconds: float) -> None:
        self.compute_s.append(seconds)


def train(rank: int, config: RunConfig, data: Path, folder: Path, slow: int) -> None:
    from diffusers.models.transformers.transformer_krea2 import Krea2TransformerBlock

    if rank == slow:
        forward = Krea2TransformerBlock.forward

        def slowly(self: object, *args: object, **more: object) -> object:
            threading.Event().wait(SLEEP_S)
            return forward(self, *args, **more)

        Krea2TransformerBlock.forward = slowly
    notes = Notes()
    run(config, data, folder / "run", notes)
    (folder / f"rank-{rank}").write_text(f"{len(notes.compute_s)} {notes.compute_s[-1]}")


@pytest.mark.parametrize("slow", [0, 1])
def test_only_the_slow_rank_says_that_it_computes_long(tmp_path: Path, slow: int) -> None:
    data = tmp_path / "shards"
    prepare(captioned_images(tmp_path / "images", 20), data, seed=0, rows_per_shard=10)
    config = tiny_run(steps=8, checkpoint={"every_steps": 8, "keep": 1})
    assert group(2, train, config, data, tmp_path, slow) == [0, 0]
    steps, compute_s = zip(*((tmp_path / f"rank-{rank}").read_text().split() for rank in range(2)), strict=True)
    assert steps == ("8", "8")
    own, other = float(compute_s[slow]), float(compute_s[1 - slow])
    assert own >= BLOCKS * SLEEP_S
    assert other < own / 2, "it waited just as long, and did not compute meanwhile"
