"""Who gets in: every bound is checked here, before any work and before any memory is taken."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from tidegate.ids import RequestId
from tidegate.serve.api import ImagesBody
from tidegate.serve.work import ImageJob, Size
from tidegate.spec.tenants import HedgeWord

SEED_LIMIT = 2**53
"""Whole numbers up to here survive JSON in every language."""

_SIZE = re.compile(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,5})")

_NOT_MADE = {
    "style": "the model knows no styles; describe it in 'prompt'",
    "complexity": "the model plans nothing beforehand; leave it out",
    "frame_count": "single pictures are made, no GIF; leave it out",
    "frame_duration_ms": "single pictures are made, no GIF; leave it out",
    "svg": "pixels are made, no SVG; leave it out",
}
"""OpenAI's or others' fields that nothing here can honour: refused, since to ignore one is to answer something else."""

Format = Literal["png", "jpeg", "webp"]

_FORMATS: tuple[Format, ...] = ("png", "jpeg", "webp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the served model can do, and how much the gateway takes on."""

    model: str
    sizes: tuple[Size, ...]
    """All sizes that it makes; the first is the default."""
    images_max: int = 10
    """In one request, as OpenAI's own limit."""
    prompt_chars_max: int = 4000
    steps_max: int = 200
    guidance: float | None = None
    """The model's own; None = it can't be guided, and `guidance_scale` and `negative_prompt` are refused."""
    guidance_max: float = 30.0
    quality_steps: Mapping[str, int] = field(default_factory=dict)
    """OpenAI's `quality` as denoise steps, `{low: 8, high: 28}`; one that isn't named is refused."""
    waiting_max: int = 2000
    """Requests that may wait for a place in one gateway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """How the pictures are to be handed over."""

    format: Format = "png"
    compression: int = 100
    """0 to 100, of JPEG and WebP; 100 = best."""
    as_url: bool = False
    """As a `data:` address: pictures are not stored."""
    stream: bool = False


@dataclass(frozen=True, slots=True)
class Admitted:
    job: ImageJob
    reply: Reply


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Not let in. Maps one to one to an `ApiError`."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None


def admit(
    body: ImagesBody,
    limits: Limits,
    *,
    request: RequestId,
    waiting: int,
    drawn_seed: int,
    keep_local: bool = False,
    hedge: HedgeWord = "never",
    priority: int = 0,
) -> Admitted | Refused:
    """Check a body against the limits and fill in its defaults.

    `waiting` is how many requests wait in this gateway now; `drawn_seed` is used where the client named none.
    `keep_local`, `hedge` and `priority` are the caller's, by their key.
    """
    if body.model is not None and body.model != limits.model:
        return Refused(
            status=404,
            message=f"the model '{body.model[:100]}' does not exist; served here: '{limits.model}'",
            param="model",
            code="model_not_found",
        )
    refused = _not_made(body) or _out_of_bounds(body, limits) or _unguided(body, limits)
    if refused is not None:
        return refused
    if body.hedge and hedge == "never":
        why = "'hedge': this key's pictures are not bought twice; leave it out"
        return Refused(status=400, message=why, param="hedge", code="unsupported_parameter")
    reply = _reply(body)
    if isinstance(reply, Refused):
        return reply
    size = _size(body, limits)
    if isinstance(size, Refused):
        return size
    steps = _steps(body, limits)
    if isinstance(steps, Refused):
        return steps
    if waiting >= limits.waiting_max:
        return Refused(
            status=429,
            message=f"{waiting} requests wait already; try again later",
            code="rate_limit_exceeded",
            retry_after_s=1.0,
        )
    job = ImageJob(
        request=request,
        model=limits.model,
        prompt=body.prompt,
        images=1 if body.n is None else body.n,
        size=size,
        seed=drawn_seed if body.seed is None else body.seed,
        seed_asked=body.seed is not None,
        steps=steps,
        local_only=keep_local or bool(body.local_only),
        guidance=body.guidance_scale,
        negative_prompt=body.negative_prompt or "",
        hedge=hedge == "always" if body.hedge is None else body.hedge,
        priority=priority,
        partial_images=body.partial_images or 0,
    )
    return Admitted(job, reply)


def parse_size(text: str) -> Size:
    """Read `WxH`.

    Raises:
        ValueError: it is something else, or a side has more than six digits.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"must be WIDTHxHEIGHT in pixels, got {text[:40]!r}")
    return Size(int(match[1]), int(match[2]))


def _not_made(body: ImagesBody) -> Refused | None:
    for name, why in _NOT_MADE.items():
        if getattr(body, name) not in (None, ""):
            return Refused(status=400, message=f"'{name}': {why}", param=name, code="unsupported_parameter")
    choices = (
        ("response_format", body.response_format, ("b64_json", "url")),
        ("output_format", body.output_format, _FORMATS),
        ("background", body.background, ("auto", "opaque")),
        # Nothing here looks at pictures, so both of OpenAI's levels hold.
        ("moderation", body.moderation, ("auto", "low")),
    )
    for name, value, known in choices:
        if value is not None and value not in known:
            return _invalid(name, f"must be one of {_listed(known)}; got '{value[:40]}'")
    if body.partial_images and not body.stream:
        return _invalid("partial_images", "is for streams; set stream, or leave it out")
    return None


def _reply(body: ImagesBody) -> Reply | Refused:
    format_: Format = next((known for known in _FORMATS if known == body.output_format), "png")
    if body.output_compression is not None and format_ == "png":
        return _invalid("output_compression", "is for 'jpeg' and 'webp'; set output_format, or leave it out")
    if body.stream and body.response_format == "url":
        return _invalid("response_format", "must be 'b64_json' in a stream")
    return Reply(
        format=format_,
        compression=100 if body.output_compression is None else body.output_compression,
        as_url=body.response_format == "url",
        stream=bool(body.stream),
    )


def _out_of_bounds(body: ImagesBody, limits: Limits) -> Refused | None:
    if not body.prompt.strip():
        return _invalid("prompt", "must not be empty")
    if len(body.prompt) > limits.prompt_chars_max:
        return _invalid("prompt", f"may have {limits.prompt_chars_max} characters, got {len(body.prompt)}")
    ranges = (
        ("n", body.n, 1, limits.images_max),
        # The last image's seed, not only the first's, must stay in range.
        ("seed", body.seed, 0, SEED_LIMIT - limits.images_max),
        ("num_inference_steps", body.num_inference_steps, 1, limits.steps_max),
        ("output_compression", body.output_compression, 0, 100),
        # OpenAI's own limit.
        ("partial_images", body.partial_images, 0, 3),
    )
    for name, value, low, high in ranges:
        if value is not None and not low <= value <= high:
            return _invalid(name, f"must be {low} to {high}, got {str(value)[:40]}")
    return None


def _unguided(body: ImagesBody, limits: Limits) -> Refused | None:
    asked = {"guidance_scale": body.guidance_scale is not None, "negative_prompt": bool(body.negative_prompt)}
    for name in (name for name in asked if asked[name] and limits.guidance is None):
        why = f"'{name}': '{limits.model}' can't be guided; leave it out"
        return Refused(status=400, message=why, param=name, code="unsupported_parameter")
    guidance = limits.guidance if body.guidance_scale is None else body.guidance_scale
    if guidance is not None and not 0 <= guidance <= limits.guidance_max:
        return _invalid("guidance_scale", f"must be 0 to {limits.guidance_max:g}, got {guidance:g}")
    if body.negative_prompt and not guidance:
        return _invalid("negative_prompt", "has no effect without guidance; set guidance_scale above 0")
    if body.negative_prompt and len(body.negative_prompt) > limits.prompt_chars_max:
        return _invalid("negative_prompt", f"may have {limits.prompt_chars_max} characters")
    return None


def _steps(body: ImagesBody, limits: Limits) -> int | Refused | None:
    if body.quality in (None, "auto"):
        return body.num_inference_steps
    if body.quality not in limits.quality_steps:
        known = _listed(("auto", *limits.quality_steps))
        return _invalid("quality", f"must be one of {known}; got '{body.quality[:40]}'")
    if body.num_inference_steps is not None:
        return _invalid("quality", "stands for a number of steps here; leave out either it or num_inference_steps")
    return limits.quality_steps[body.quality]


def _size(body: ImagesBody, limits: Limits) -> Size | Refused:
    if (body.width is None) != (body.height is None):
        lone, other = ("width", "height") if body.height is None else ("height", "width")
        return _invalid(lone, f"needs '{other}' beside it")
    asked: Size | None = None
    known = _listed(limits.sizes)
    if body.size is not None and body.size != "auto":
        try:
            asked = parse_size(body.size)
        except ValueError:
            return _invalid("size", f"must be 'WIDTHxHEIGHT' in pixels, one of {known}; got '{body.size[:40]}'")
    if body.width is not None and body.height is not None:
        by_sides = Size(body.width, body.height)
        if asked is not None and asked != by_sides:
            return _invalid("size", f"'{asked}' is not width x height, {str(by_sides)[:40]}; leave out either")
        if by_sides not in limits.sizes:
            return _invalid("width", f"{str(by_sides)[:40]} is not made by '{limits.model}'; use one of {known}")
        return by_sides
    if asked is None:
        return limits.sizes[0]
    if asked not in limits.sizes:
        return _invalid("size", f"'{asked}' is not made by '{limits.model}'; use one of {known}")
    return asked


def _listed(known: tuple[object, ...]) -> str:
    return ", ".join(f"'{one}'" for one in known)


def _invalid(param: str, why: str) -> Refused:
    return Refused(status=400, message=f"'{param}': {why}", param=param, code="invalid_value")
