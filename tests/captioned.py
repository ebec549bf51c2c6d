"""A folder of small captioned images, and a run small enough for tests."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from PIL import Image

from tidegate.train.config import RunConfig

COLOURS = ("black", "grey", "white")


def captioned_images(folder: Path, count: int, side: int = 4) -> Path:
    """`count` grey images of `side` x `side`, each with its own level and one of three captions."""
    folder.mkdir(parents=True)
    lines = []
    for number in range(count):
        level = 255 * number // max(1, count - 1)
        Image.fromarray(np.full((side, side), level, dtype=np.uint8)).save(folder / f"{number:03d}.png")
        lines.append(json.dumps({"file_name": f"{number:03d}.png", "text": COLOURS[min(2, 3 * number // count)]}))
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def tiny_run(**changes: object) -> RunConfig:
    """Two layers, 13 thousand parameters, a batch of 7, which no number of ranks above one divides."""
    values: dict[str, object] = {
        "name": "tiny",
        "seed": 1,
        "steps": 12,
        "global_batch": 7,
        "image": {"width": 4, "height": 4, "channels": 1, "patch": 2},
        "text": {"length": 6, "width": 8, "seed": 0},
        "model": {
            "in_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 32,
            "timestep_embed_dim": 16,
            "text_hidden_dim": 8,
            "num_text_layers": 1,
            "text_num_attention_heads": 2,
            "text_num_key_value_heads": 2,
            "text_intermediate_size": 16,
            "num_layerwise_text_blocks": 0,
            "num_refiner_text_blocks": 1,
            "axes_dims_rope": (4, 2, 2),
        },
        "optimizer": {"lr": 0.01, "warmup_steps": 2, "decay_steps": 3},
        "checkpoint": {"every_steps": 3, "keep": 2},
        "sample": {"steps": 4},
        "timeout_s": 30.0,
    }
    return RunConfig.model_validate({**values, **changes})
