"""Who gets in: every bound is checked here, before any work and before any memory is taken."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tidegate.ids import RequestId
from tidegate.serve.api import ImagesBody
from tidegate.serve.work import ImageJob, Size

SEED_LIMIT = 2**53
"""Whole numbers up to here survive JSON in every language."""

_SIZE = re.compile(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,5})")


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
    waiting_max: int = 2000
    """Requests that may wait for a place in one gateway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Not let in. Maps one to one to an `ApiError`."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None


def admit(body: ImagesBody, limits: Limits, *, request: RequestId, waiting: int, drawn_seed: int) -> ImageJob | Refused:
    """Check a body against the limits and fill in its defaults.

    `waiting` is how many requests wait in this gateway now; `drawn_seed` is used where the client named none.
    """
    if body.model is not None and body.model != limits.model:
        return Refused(
            status=404,
            message=f"the model '{body.model}' does not exist; served here: '{limits.model}'",
            param="model",
            code="model_not_found",
        )
    refused = _unsupported(body) or _out_of_bounds(body, limits)
    if refused is not None:
        return refused
    size = _size(body.size, limits)
    if isinstance(size, Refused):
        return size
    if waiting >= limits.waiting_max:
        return Refused(
            status=429,
            message=f"{waiting} requests wait already; try again later",
            code="rate_limit_exceeded",
            retry_after_s=1.0,
        )
    return ImageJob(
        request=request,
        model=limits.model,
        prompt=body.prompt,
        images=1 if body.n is None else body.n,
        size=size,
        seed=drawn_seed if body.seed is None else body.seed,
        seed_asked=body.seed is not None,
        steps=body.num_inference_steps,
        local_only=bool(body.local_only),
    )


def parse_size(text: str) -> Size:
    """Read `WxH`.

    Raises:
        ValueError: it is something else, or a side has more than six digits.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"must be WIDTHxHEIGHT in pixels, got {text[:40]!r}")
    return Size(int(match[1]), int(match[2]))


def _unsupported(body: ImagesBody) -> Refused | None:
    if body.response_format not in (None, "b64_json"):
        return _invalid("response_format", f"must be 'b64_json' (images are not stored), got '{body.response_format}'")
    if body.output_format not in (None, "png"):
        return _invalid("output_format", f"must be 'png', got '{body.output_format}'")
    if body.stream:
        return _invalid("stream", "must be false: images come whole")
    if body.partial_images:
        return _invalid("partial_images", f"must be 0: images come whole, got {body.partial_images}")
    return None


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
    )
    for field, value, low, high in ranges:
        if value is not None and not low <= value <= high:
            return _invalid(field, f"must be {low} to {high}, got {value}")
    return None


def _size(asked: str | None, limits: Limits) -> Size | Refused:
    if asked is None or asked == "auto":
        return limits.sizes[0]
    known = ", ".join(f"'{size}'" for size in limits.sizes)
    try:
        size = parse_size(asked)
    except ValueError:
        return _invalid("size", f"must be 'WIDTHxHEIGHT' in pixels, one of {known}; got '{asked[:40]}'")
    if size not in limits.sizes:
        return _invalid("size", f"'{size}' is not made by '{limits.model}'; use one of {known}")
    return size


def _invalid(param: str, why: str) -> Refused:
    return Refused(status=400, message=f"'{param}': {why}", param=param, code="invalid_value")
