"""How new weights are tried before they serve."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from tidegate.spec.base import Model

Prompt = Annotated[str, Field(min_length=1)]


class RolloutSpec(Model):
    """One replica makes these pictures with new weights, and with those that serve, before any client gets one."""

    prompts: Annotated[tuple[Prompt, ...], Field(min_length=1, max_length=100)] = (
        "a red cube beside a blue sphere on a white table",
        "a portrait of an old sailor",
        "a city street at night in the rain",
    )
    seed: Annotated[int, Field(ge=0)] = 7
    """Of the first; the next one's is one more."""
    distance_max: Annotated[float, Field(gt=0, le=1)] | None = None
    """How far the pictures may be from those of the weights that serve (`parity.distance`, 0 = alike, 1 = opposite), in
    the mean; none = as far as they like. Whatever it is, a picture of one colour is refused."""
