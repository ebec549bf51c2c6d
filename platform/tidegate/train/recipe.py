"""What travels with weights so that a server can make images from them without the run's config."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from tidegate.spec.policy import Model
from tidegate.train.config import ImageSpec, Positive, RunConfig, Shift, TextSpec
from tidegate.train.stages import stages


class Recipe(Model):
    image: ImageSpec
    text: TextSpec
    steps: Positive
    """Euler steps by default."""
    shift: Shift = 1.0
    """Of the sampler's time grid."""
    guidance: Annotated[float, Field(ge=0)] = 0.0
    """g in v = cond + g · (cond - uncond), as Krea 2 counts it; 0: none."""

    @classmethod
    def of(cls, config: RunConfig) -> Recipe:
        """Images have the size of the last stage."""
        how = config.sample
        image = stages(config)[-1].image
        return cls(image=image, text=config.text, steps=how.steps, shift=how.shift, guidance=how.guidance)
