"""Pictures a second of the engine, against a plain loop over the same diffusers pipeline that takes one request after
the other.

Requests of two sizes, 4 to 8 steps, with and without guidance, come at random and faster than either can work them off.
Both sides load the same folder (a whole Krea2Pipeline of random weights, small enough for a CPU), start a request no
sooner than it has come, and pack each picture as the same PNG. `mixed`: prompts repeat, as users' do; `unlike`: each
prompt is another one, so that keeping encoded texts is of no use. Each picture is compared with the loop's.

Takes about two minutes on two cores.
"""

from __future__ import annotations

import argparse
import io
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.contract import compared, figure, publish
from diffusers import DiffusionPipeline, Krea2Transformer2DModel
from PIL import Image
from tests.tiny_pipeline import LAYERS, WIDTH, write_pipeline

from tidegate.serve.engine import Engine
from tidegate.serve.options import EngineOptions
from tidegate.serve.studio import png
from tidegate.serve.work import Size

SIZES = (Size(64, 64), Size(96, 64))
TEXT_LENGTH = 32
REQUESTS = 32
PER_S = 200.0
"""Arrivals: far more than either side can do, so that what is measured is how much it does."""
PROMPTS = 6
OPTIONS = EngineOptions(sizes=SIZES, batch_max=8, text_length=TEXT_LENGTH)


@dataclass(frozen=True, slots=True)
class Request:
    at_s: float
    prompt: str
    seed: int
    size: Size
    steps: int
    guidance: float


def requests(round_number: int, prompts: int) -> list[Request]:
    draw = random.Random(round_number)
    at_s = 0.0
    asked = []
    for number in range(REQUESTS):
        at_s += draw.expovariate(PER_S)
        prompt = f"a number {number % prompts} of color {round_number}"
        how = (draw.choice(SIZES), draw.randint(4, 8), draw.choice((0.0, 3.0)))
        asked.append(Request(at_s, prompt, number, *how))
    return asked


def loop(pipeline: Any, asked: Sequence[Request]) -> tuple[float, list[bytes]]:
    """Seconds from the first arrival to the last picture, and the pictures."""
    made, began_s = [], time.perf_counter()
    for one in asked:
        _until(began_s + one.at_s)
        answer = pipeline(
            one.prompt,
            width=one.size.width,
            height=one.size.height,
            num_inference_steps=one.steps,
            guidance_scale=one.guidance,
            max_sequence_length=TEXT_LENGTH,
            generator=torch.Generator().manual_seed(one.seed),
            output_type="np",
        )
        made.append(png((np.asarray(answer.images[0]) * 255).round().astype(np.uint8)))
    return time.perf_counter() - began_s, made


def engine_run(engine: Engine, asked: Sequence[Request]) -> tuple[float, list[bytes]]:
    """As `loop`."""
    began_s = time.perf_counter()
    made: list[Future[tuple[tuple[bytes, ...], float]]] = []
    for one in asked:
        _until(began_s + one.at_s)
        made.append(engine.submit([one.prompt], [one.seed], size=one.size, steps=one.steps, guidance=one.guidance))
    pictures = [future.result()[0][0] for future in made]
    return time.perf_counter() - began_s, pictures


def _until(at_s: float) -> None:
    time.sleep(max(0.0, at_s - time.perf_counter()))


def levels_apart(one: bytes, other: bytes) -> int:
    """Of 255, where two pictures differ most."""
    pixels = [np.asarray(Image.open(io.BytesIO(picture))).astype(int) for picture in (one, other)]
    return int(np.abs(pixels[0] - pixels[1]).max())


def pipeline_folder(folder: Path) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        network = Krea2Transformer2DModel(
            in_channels=16,
            num_layers=6,
            attention_head_dim=24,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=256,
            timestep_embed_dim=64,
            text_hidden_dim=WIDTH,
            num_text_layers=LAYERS,
            text_num_attention_heads=2,
            text_num_key_value_heads=2,
            text_intermediate_size=32,
            num_layerwise_text_blocks=1,
            num_refiner_text_blocks=1,
            axes_dims_rope=(8, 8, 8),
        )
    return write_pipeline(folder / "krea", network)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="after one of warm-up")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = pipeline_folder(Path(folder))
        engine = Engine(path, OPTIONS)
        pipeline = DiffusionPipeline.from_pretrained(path)
        pipeline.set_progress_bar_config(disable=True)
        rates: dict[str, tuple[list[float], list[float]]] = {"mixed": ([], []), "unlike": ([], [])}
        apart: list[float] = []
        for number in range(arguments.rounds + 1):
            for kind, prompts in (("mixed", PROMPTS), ("unlike", REQUESTS)):
                asked = requests(number, prompts)
                sides: list[Callable[[], tuple[float, list[bytes]]]] = [
                    lambda asked=asked: engine_run(engine, asked),  # type: ignore[misc]
                    lambda asked=asked: loop(pipeline, asked),  # type: ignore[misc]
                ]
                order = (0, 1) if number % 2 else (1, 0)  # neither always comes first
                found = {side: sides[side]() for side in order}
                (ours_s, ours), (theirs_s, theirs) = found[0], found[1]
                worst = max(map(levels_apart, ours, theirs))
                print(
                    f"round {number or 'warm-up'} {kind}: {REQUESTS / ours_s:.1f} pictures/s, the loop"
                    f" {REQUESTS / theirs_s:.1f}; at most {worst} levels apart",
                    flush=True,
                )
                if number:
                    rates[kind][0].append(REQUESTS / ours_s)
                    rates[kind][1].append(REQUESTS / theirs_s)
                    apart.append(worst)
        engine.close()
    publish(
        "engine",
        {
            "over_plain_loop": compared(*rates["mixed"], role="peer", ratio="ours / theirs", goal=">= 1.2"),
            "over_plain_loop_unlike": compared(*rates["unlike"], role="peer", ratio="ours / theirs", goal=">= 1.0"),
            "levels_apart": figure(
                [max(apart)],
                goal="<= 1",
                note="of 255, the worst pixel: alone a picture has the loop's bits, in a batch not always",
            ),
        },
        rounds=arguments.rounds,
        packages=("tidegate", "torch", "diffusers"),
    )


if __name__ == "__main__":
    main()
