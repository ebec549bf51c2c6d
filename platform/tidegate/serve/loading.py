"""A folder of weights becomes something that paints: our own exports, and any pipeline that diffusers can load."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from tidegate.errors import ModelRefusedError
from tidegate.serve.embeddings import Embeddings
from tidegate.serve.options import EngineOptions
from tidegate.serve.painters.base import Painter
from tidegate.serve.painters.pipeline import PipelinePainter
from tidegate.serve.painters.stepwise import KreaParts, OwnParts, StepPainter
from tidegate.serve.work import Size
from tidegate.train.export import load_export
from tidegate.train.export_manifest import MANIFEST, export_id
from tidegate.train.pipeline import INDEX
from tidegate.train.recipe import Recipe

STEPS, STEPS_DISTILLED, GUIDANCE = 28, 8, 4.5
"""Of a Krea 2 pipeline that came without a recipe: its `__call__`'s own defaults (diffusers 0.42)."""


@dataclass(frozen=True, slots=True)
class Loaded:
    painter: Painter
    export: str
    """Two folders share it only if they hold the same."""
    recipe: Recipe | None


def load(folder: Path, device: torch.device, options: EngineOptions) -> Loaded:
    """Check and load; with a manifest every file by its hash and every tensor by its shape.

    Raises:
        ModelRefusedError: with the first thing that is wrong.
    """
    if (folder / MANIFEST).exists() or not (folder / INDEX).exists():
        return _own(folder, device, options)
    identity = _check_pipeline(folder)
    return Loaded(_painter(folder, _pipeline(folder, device), options, None), identity, None)


def _own(folder: Path, device: torch.device, options: EngineOptions) -> Loaded:
    export = export_id(folder)
    network, recipe = load_export(folder)
    if recipe.text.encoder == "bytes":
        size = Size(recipe.image.width, recipe.image.height)
        if options.sizes not in ((), (size,)):
            raise ModelRefusedError(str(folder), f"makes {size} only; leave out `sizes`")
        parts = OwnParts(recipe, device)
        painter = StepPainter(
            _compiled(network.to(device), options), parts, (size,), Embeddings(options.embeddings_bytes)
        )
        return Loaded(painter, export, recipe)
    if not (folder / INDEX).exists():
        why = "has no text encoder and no autoencoder; export it with jobs/export_pipeline.py --parts"
        raise ModelRefusedError(str(folder), why)
    pipeline = _pipeline(folder, device, transformer=network.to(_kind(device)))
    return Loaded(_painter(folder, pipeline, options, recipe), export, recipe)


def _painter(folder: Path, pipeline: Any, options: EngineOptions, recipe: Recipe | None) -> Painter:
    from diffusers import FlowMatchEulerDiscreteScheduler, Krea2Pipeline

    sizes = options.sizes or _own_sizes(folder, pipeline, recipe)
    side = _side(pipeline)
    for size in sizes:
        if size.width % side or size.height % side:
            raise ModelRefusedError(str(folder), f"sizes: {size}: both sides must be multiples of {side}")
    embeddings = Embeddings(options.embeddings_bytes)
    euler = type(pipeline.scheduler) is FlowMatchEulerDiscreteScheduler and not pipeline.scheduler.config.get(
        "stochastic_sampling"
    )
    if not isinstance(pipeline, Krea2Pipeline) or not euler:
        for name in ("transformer", "unet"):
            if getattr(pipeline, name, None) is not None:
                setattr(pipeline, name, _compiled(getattr(pipeline, name), options))
        return PipelinePainter(pipeline, sizes, embeddings)
    distilled = bool(pipeline.config.is_distilled)
    parts = KreaParts(
        pipeline,
        text_length=recipe.text.length if recipe else options.text_length,
        steps=recipe.steps if recipe else STEPS_DISTILLED if distilled else STEPS,
        guidance=recipe.guidance if recipe else 0.0 if distilled else GUIDANCE,
    )
    return StepPainter(_compiled(pipeline.transformer, options), parts, sizes, embeddings)


def _pipeline(folder: Path, device: torch.device, **parts: Any) -> Any:
    # Seconds of imports that an export of pixels doesn't need.
    from diffusers import DiffusionPipeline

    try:
        pipeline = DiffusionPipeline.from_pretrained(
            folder, dtype=_kind(device), local_files_only=True, use_safetensors=True, **parts
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
        raise ModelRefusedError(str(folder), f"diffusers can't load it: {error}"[:500]) from None
    for part in pipeline.components.values():
        if isinstance(part, nn.Module):
            part.requires_grad_(False).eval()
    pipeline.set_progress_bar_config(disable=True)
    return pipeline.to(device)


def _check_pipeline(folder: Path) -> str:
    """What a pipeline without a manifest can be checked for: its weights' files are whole, and each network that is
    diffusers' own finds its tensors, no more and no fewer, by name and shape (`from_pretrained` would fill in random
    ones). Returns its identity: names and sizes of its files, and what the weights' headers say.
    """
    said = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        said.update(f"{path.relative_to(folder)} {path.stat().st_size}\n".encode())
    try:
        index = json.loads((folder / INDEX).read_bytes())
        # A part is `[library, class]`; other lists are settings, and `[null, null]` is a part that isn't there.
        parts = [(name, *value) for name, value in index.items() if isinstance(value, list) and len(value) == 2]
        for name, library, kind in parts:
            if not isinstance(library, str) or not isinstance(kind, str):
                continue
            if not (folder / name).is_dir():
                raise ValueError(f"{name}: is missing")
            there = _tensors(folder / name)
            if there and library == "diffusers":
                _check_network(folder / name, kind, there)
            said.update(repr(sorted(there.items())).encode())
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelRefusedError(str(folder), str(error)) from None
    return said.hexdigest()[:16]


def _tensors(part: Path) -> dict[str, tuple[int, ...]]:
    """Shapes by name, of all safetensors files in a part's folder. Opening one checks that it is as long as it says."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(part.glob("*.safetensors")):
        if path.name.count(".") > 1:  # a variant (`.fp16.safetensors`) beside the one that is loaded
            continue
        try:
            with safe_open(path, "pt") as file:
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{part.name}/{path.name}: {error}") from None
    return shapes


def _check_network(part: Path, kind: str, there: dict[str, tuple[int, ...]]) -> None:
    import diffusers

    network_type = getattr(diffusers, kind)
    with torch.device("meta"):
        network = network_type.from_config(network_type.load_config(part))
    wanted = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    for names, what in ((wanted.keys() - there.keys(), "missing"), (there.keys() - wanted.keys(), "not the network's")):
        if names:
            raise ValueError(f"{part.name}: {len(names)} tensors are {what}, first {min(names)}")
    for name, shape in wanted.items():
        if there[name] != shape:
            raise ValueError(f"{part.name}: {name}: shape {there[name]}, must be {shape}")


def _own_sizes(folder: Path, pipeline: Any, recipe: Recipe | None) -> tuple[Size, ...]:
    if recipe is not None:
        return (Size(recipe.image.width, recipe.image.height),)
    side = getattr(pipeline, "default_sample_size", None)
    if not isinstance(side, int):
        raise ModelRefusedError(str(folder), "doesn't say what size it makes; name them (`sizes: [1024x1024]`)")
    return (Size(side * pipeline.vae_scale_factor, side * pipeline.vae_scale_factor),)


def _side(pipeline: Any) -> int:
    """What both sides of a picture must be multiples of."""
    processor = getattr(pipeline, "image_processor", None)
    config = getattr(processor, "config", {})
    return int(config.get("vae_scale_factor", getattr(pipeline, "vae_scale_factor", 1)))


def _compiled(network: nn.Module, options: EngineOptions) -> nn.Module:
    # Shapes are fixed, so each is compiled for itself: `dynamic` would trade speed for what never comes.
    if options.compile == "none":
        return network
    return torch.compile(network, dynamic=False, backend=options.compile)  # type: ignore[return-value]


def _kind(device: torch.device) -> torch.dtype:
    """16 bits where the device is made for them; the networks keep what must stay float32 by their own rule."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32
