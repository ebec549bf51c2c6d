"""Weights as a folder that a server can load and diffusers can too.

transformer/config.json, transformer/*.safetensors   as `Krea2Transformer2DModel.from_pretrained` reads them
recipe.json                                           how to sample from them
model_index.json, scheduler/, text_encoder/, …        where a network of latents has the parts it needs beside it:
                                                      a whole pipeline for `DiffusionPipeline.from_pretrained`
manifest.json                                         sizes and hashes of the others; no manifest, no export
"""

from __future__ import annotations

import json
import logging
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers.models.transformers.transformer_krea2 import Krea2Transformer2DModel
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from tidegate.checkpoint.files import file_problem, folder_files, sync_tree, write_synced
from tidegate.errors import ModelRefusedError
from tidegate.train.config import ModelSpec
from tidegate.train.export_manifest import MANIFEST, ExportManifest, read_manifest
from tidegate.train.model import build
from tidegate.train.pipeline import put_parts
from tidegate.train.recipe import Recipe

RECIPE = "recipe.json"
WEIGHTS = "transformer"

logger = logging.getLogger(__name__)


def write_export(
    folder: Path,
    model_config: ModelSpec,
    state_dict: Mapping[str, Tensor],
    recipe: Recipe,
    *,
    run: str,
    step: int,
    parts: Path | None = None,
) -> None:
    """Write the export at `folder`, whole or not at all: staged beside it, synced to disk, renamed into place.

    An export that stands there already is replaced. `state_dict` holds full (not sharded) tensors under the
    network's own names. `parts`: a `Krea2Pipeline`'s folder whose other parts the export gets (`put_parts`).

    Raises:
        ConfigError: the parts don't fit.
        RuntimeError: `state_dict` misses a tensor of the network, or has one too many (torch names it).
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    staged = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}")
    try:
        with torch.device("meta"):
            network = build(model_config)
        network.load_state_dict(dict(state_dict), strict=True, assign=True)
        network.save_pretrained(staged / WEIGHTS)
        if parts is not None:
            put_parts(staged, parts, model_config, recipe)
        (staged / RECIPE).write_text(recipe.model_dump_json(indent=2) + "\n", encoding="utf-8")
        manifest = ExportManifest(run=run, step=step, files=folder_files(staged))
        sync_tree(staged)
        write_synced(staged / MANIFEST, manifest.model_dump_json(indent=2).encode() + b"\n")
        _put_in_place(staged, folder)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def load_export(folder: Path) -> tuple[Krea2Transformer2DModel, Recipe]:
    """The network (CPU, eval mode) and its recipe, after checking that every file and every tensor is there and whole.

    Raises:
        ModelRefusedError: with the first thing that is wrong; nothing has been loaded then.
    """
    manifest = read_manifest(folder)
    listed = {file.name for file in manifest.files}
    for needed in (RECIPE, f"{WEIGHTS}/config.json"):
        if needed not in listed:
            raise ModelRefusedError(str(folder), f"{needed}: not in the manifest")
    for file in manifest.files:
        problem = file_problem(folder, file)
        if problem is not None:
            raise ModelRefusedError(str(folder), problem)
    try:
        recipe = Recipe.model_validate_json((folder / RECIPE).read_bytes())
        spec = _spec(json.loads((folder / WEIGHTS / "config.json").read_bytes()))
    except (ValidationError, ValueError) as error:
        raise ModelRefusedError(str(folder), f"{RECIPE} or config.json: {error}") from None
    weights: dict[str, Tensor] = {}
    for name in sorted(name for name in listed if name.startswith(WEIGHTS) and name.endswith(".safetensors")):
        try:
            weights.update(load_file(folder / name))
        except SafetensorError as error:
            raise ModelRefusedError(str(folder), f"{name}: {error}") from None
    return _filled(folder, spec, weights), recipe


def _filled(folder: Path, spec: ModelSpec, weights: Mapping[str, Tensor]) -> Krea2Transformer2DModel:
    with torch.device("meta"):
        network = build(spec)
    expected = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    missing, extra = sorted(expected.keys() - weights.keys()), sorted(weights.keys() - expected.keys())
    if missing or extra:
        what = [f"{len(missing)} missing, first {missing[0]}"] if missing else []
        what += [f"{len(extra)} that the network does not have, first {extra[0]}"] if extra else []
        raise ModelRefusedError(str(folder), f"tensors: {'; '.join(what)} (of {len(expected)})")
    for name, tensor in weights.items():
        if tuple(tensor.shape) != expected[name]:
            raise ModelRefusedError(str(folder), f"{name}: shape {tuple(tensor.shape)}, must be {expected[name]}")
        if not torch.isfinite(tensor).all():
            raise ModelRefusedError(str(folder), f"{name}: has values that are not finite")
    network.load_state_dict(dict(weights), strict=True, assign=True)
    return network.requires_grad_(False).eval()


def _spec(config: Mapping[str, Any]) -> ModelSpec:
    values = {name: config[name] for name in ModelSpec.model_fields if name in config}
    return ModelSpec(**{**values, "axes_dims_rope": tuple(values.get("axes_dims_rope", ()))})


def _put_in_place(staged: Path, folder: Path) -> None:
    if not folder.exists():
        staged.rename(folder)
        return
    # POSIX has no exchange of directories: the old one steps aside for the moment between two renames.
    aside = folder.with_name(f".{folder.name}.old.{uuid.uuid4().hex[:8]}")
    folder.rename(aside)
    staged.rename(folder)
    shutil.rmtree(aside, ignore_errors=True)
