"""Capacity outside, as the operator describes it: `providers` and `canary` in `policy.yaml`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tidegate.spec.base import Model, Seconds, SizeText

AskedField = Literal["images", "size", "width", "height", "seed", "steps", "format", "guidance", "negative_prompt"]
"""What a request may ask for, in our words."""


class ProviderSpec(Model):
    name: str
    kind: Literal["openai", "fal", "replicate"] = "openai"
    """The wire protocol: which file in `serve/providers/` speaks to it."""
    base_url: str
    """`openai`: up to and with `/v1`. `fal`: https://queue.fal.run. `replicate`: https://api.replicate.com/v1."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the key; keys never stand in this file."""
    models: dict[str, str] = Field(default_factory=dict)
    """Our model's name -> theirs. A model that isn't named here is not sent to this provider."""
    fields: dict[AskedField, str] = Field(default_factory=dict)
    """Our word for a field -> theirs, where their model differs from its kind's usual names (`docs/providers.md`). An
    empty name = it has no such field: requests that ask for it go elsewhere."""
    guidance: Literal["ours", "cfg"] = "ours"
    """The scale of its field for guidance, where `fields` names one. `cfg`: classifier-free guidance as diffusers,
    SGLang, fal and Replicate count it, 1 = none; a request's own *g* is sent as 1 + *g*. `ours`: another tidegate's."""
    images_max: Annotated[int, Field(ge=1)] = 10
    """Pictures that it makes in one request."""
    sizes: tuple[SizeText, ...] | None = None
    """Sizes that it can make, `WxH`; none = all."""
    slots: Annotated[int, Field(ge=1)] = 8
    """Requests that it takes at a time."""
    price_per_image_usd: Annotated[float, Field(ge=0)] = 0.0
    prices_usd: dict[SizeText, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    """Price of one image by its size, `WxH`; sizes that are not named cost `price_per_image_usd`."""
    timeout_s: Seconds = 30.0
    cooldown_s: Seconds = 5.0
    """How long it is left alone after a failure, unless it says so itself by `Retry-After`."""


class CanarySpec(Model):
    """Pictures that each provider is asked for from time to time. They prove that it answers, and that it still makes
    what it made. Each costs what any picture does."""

    every_s: Seconds | None = None
    """Between two canaries of one provider; none = only when a claim needs the way out proven."""
    prompt: Annotated[str, Field(min_length=1)] = "a red cube beside a blue sphere on a white table"
    seed: Annotated[int, Field(ge=0)] = 7
    distance_max: Annotated[float, Field(gt=0, le=1)] = 0.25
    """From its reference (`parity.distance`, 0 = alike, 1 = opposite): above it a picture has drifted."""
    strikes: Annotated[int, Field(ge=1)] = 2
    """Drifted canaries in a row that close a provider; as many good ones open it again."""
