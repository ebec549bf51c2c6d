"""What travels with weights so that a server can make images from them without the run's config."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from tidegate.spec.policy import Model
from tidegate.train.config import ImageSpec, Positive, RunConfig, TextSpec


class Recipe(Model):
    image: ImageSpec
    text: TextSpec
    steps: Positive
    """Euler steps by default."""
    shift: Annotated[float, Field(gt=0)] = 1.0
    """Of the sampler's time grid."""

    @classmethod
    def of(cls, config: RunConfig) -> Recipe:
        return cls(image=config.image, text=config.text, steps=config.sample.steps, shift=config.sample.shift)
