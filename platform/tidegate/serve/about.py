"""What the gateway must know of weights before any replica has loaded them: a few small files of theirs."""

from __future__ import annotations

import json
from dataclasses import dataclass

from tidegate.errors import ModelRefusedError
from tidegate.serve.fetching import read_file
from tidegate.serve.work import Size
from tidegate.train.recipe import Recipe

_GUIDANCE = {"Krea2Pipeline": 4.5}
"""Of pipelines without a recipe whose own guidance is known; others take any, by their own scale."""


@dataclass(frozen=True, slots=True)
class About:
    sizes: tuple[Size, ...]
    """None where they don't say: then the application's args must."""
    guidance: float | None
    """The model's own."""


def look_at(uri: str) -> About:
    """
    Raises:
        ModelRefusedError: it is neither an export of ours nor a pipeline.
    """
    recipe = read_file(uri, "recipe.json")
    if recipe is not None:
        read = Recipe.model_validate_json(recipe)
        return About((Size(read.image.width, read.image.height),), read.guidance)
    index = read_file(uri, "model_index.json")
    if index is None:
        raise ModelRefusedError(uri, "has neither recipe.json nor model_index.json: no export and no pipeline")
    about = json.loads(index)
    distilled = bool(about.get("is_distilled"))
    return About((), 0.0 if distilled else _GUIDANCE.get(about.get("_class_name"), 1.0))
