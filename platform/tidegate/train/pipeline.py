"""A whole diffusers pipeline around a trained network: text encoder, tokenizer, autoencoder, scheduler."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tidegate.errors import ConfigError
from tidegate.train.config import ModelSpec
from tidegate.train.recipe import Recipe

INDEX = "model_index.json"
_PARTS = ("scheduler", "text_encoder", "tokenizer", "vae")
_SCHEDULER = "scheduler/scheduler_config.json"


def put_parts(staged: Path, parts: Path, model: ModelSpec, recipe: Recipe) -> None:
    """Copy a pipeline's other parts from `parts`, a folder that a `Krea2Pipeline` was saved to, beside the network in
    `staged`; with the recipe's schedule, and the index that makes `staged` a pipeline.

    Raises:
        ConfigError: a part is missing, or doesn't fit the network.
    """
    index = _json(parts / INDEX)
    for part in _PARTS:
        if part not in index or not (parts / part).is_dir():
            raise ConfigError(f"{parts}: has no {part}\nhint: take the folder of a whole Krea2Pipeline")
    taps = index.get("text_encoder_select_layers")
    if not isinstance(taps, list) or len(taps) != model.num_text_layers:
        raise ConfigError(
            f"{parts / INDEX}: text_encoder_select_layers is {taps}; model.num_text_layers is {model.num_text_layers}"
        )
    _fits(parts, model, recipe)
    for part in _PARTS:
        shutil.copytree(parts / part, staged / part)
    _write(staged / _SCHEDULER, {**_json(parts / _SCHEDULER), **_schedule(recipe)})
    about = {
        "_class_name": "Krea2Pipeline",
        "_diffusers_version": index.get("_diffusers_version"),
        "is_distilled": False,
        "patch_size": recipe.image.patch,
        "text_encoder_select_layers": taps,
        "transformer": ["diffusers", "Krea2Transformer2DModel"],
    }
    _write(staged / INDEX, {**about, **{part: index[part] for part in _PARTS}})


def _fits(parts: Path, model: ModelSpec, recipe: Recipe) -> None:
    vae, encoder = _json(parts / "vae/config.json"), _json(parts / "text_encoder/config.json")
    width = encoder.get("text_config", encoder).get("hidden_size")
    factor = 2 ** len(vae.get("temperal_downsample", ()))
    for what, here, ours in (
        ("channels of the latents, image.channels", vae.get("z_dim"), recipe.image.channels),
        ("pixels along a latent place, image.latent_factor", factor, recipe.image.latent_factor),
        ("width of a text state, model.text_hidden_dim", width, model.text_hidden_dim),
    ):
        if here != ours:
            raise ConfigError(
                f"{parts}: {what}: {here} there, {ours} in the run\nhint: take the parts it was trained with"
            )


def _schedule(recipe: Recipe) -> dict[str, Any]:
    """What `FlowMatchEulerDiscreteScheduler` must know to step through `tidegate.train.sample.grid`."""
    if recipe.shift == "resolution":
        rule = {"base_shift": 0.5, "max_shift": 1.15, "base_image_seq_len": 256, "max_image_seq_len": 6400}
        return {"use_dynamic_shifting": True, "time_shift_type": "exponential", "shift": 1.0, **rule}
    return {"use_dynamic_shifting": False, "shift": recipe.shift}


def _json(path: Path) -> dict[str, Any]:
    try:
        read: dict[str, Any] = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}\nhint: take the folder of a whole Krea2Pipeline") from None
    return read


def _write(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
