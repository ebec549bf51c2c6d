"""OpenAI's images API on the wire: what a body may hold, how an answer and an error look.

Source of the shapes: OpenAI API reference, `images/generations` and `errors`; the `openai` Python client reads both
unchanged. `seed`, `num_inference_steps` and `local_only` are ours (in the client: `extra_body`).
"""

from __future__ import annotations

import base64
import difflib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tidegate.serve.work import Made, Size

BODY_LIMIT_BYTES = 256 * 1024
"""A prompt and a few numbers; anything bigger isn't read."""


class ImagesBody(BaseModel):
    """The body of `POST /v1/images/generations` as the client wrote it. Bounds are admission's."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    prompt: str
    model: str | None = None
    n: int | None = None
    size: str | None = None
    response_format: str | None = None
    output_format: str | None = None
    seed: int | None = None
    num_inference_steps: int | None = None
    local_only: bool | None = None
    stream: bool | None = None
    partial_images: int | None = None
    # Hints of OpenAI's own models: accepted so that clients work unchanged, without effect on ours.
    background: str | None = Field(default=None, repr=False)
    moderation: str | None = Field(default=None, repr=False)
    output_compression: int | None = Field(default=None, repr=False)
    quality: str | None = Field(default=None, repr=False)
    style: str | None = Field(default=None, repr=False)
    user: str | None = Field(default=None, repr=False)


class ApiError(Exception):
    """What the client is told instead of a picture."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        retry: bool = True,
    ) -> None:
        super().__init__(status, message)
        self.status, self.message = status, message
        self.param, self.code, self.retry_after_s, self.retry = param, code, retry_after_s, retry

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kind = "invalid_request_error" if 400 <= self.status < 500 and self.status != 429 else "server_error"
        if self.status == 429:
            kind = "rate_limit_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """`Retry-After` in whole seconds (RFC 9110, 10.2.3), rounded up, at least 1; and OpenAI's own word for clients
        that would retry by themselves."""
        headers = {} if self.retry else {"x-should-retry": "false"}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
        return headers


def parse_body(raw: bytes) -> ImagesBody:
    """Read a request's body.

    Raises:
        ApiError: 400 that names the field and the fix.
    """
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be a JSON object, got {type(value).__name__}", code="invalid_json")
    try:
        return ImagesBody.model_validate(value)
    except ValidationError as error:
        raise _refusal(error.errors()[0], value) from None


def _refusal(problem: Any, value: Mapping[str, Any]) -> ApiError:
    field = ".".join(str(part) for part in problem["loc"]) or None
    if problem["type"] == "missing":
        return ApiError(400, f"missing required parameter: '{field}'", param=field, code="missing_required_parameter")
    if problem["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(field), ImagesBody.model_fields, n=1, cutoff=0.6)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        return ApiError(400, f"unknown parameter: '{field}'{hint}", param=field, code="unknown_parameter")
    got = repr(value.get(str(field)))[:60]
    why = str(problem["msg"])
    return ApiError(400, f"'{field}': {why[0].lower()}{why[1:]}, got {got}", param=field, code="invalid_type")


def images_answer(made: Made, size: Size, created_s: float) -> dict[str, Any]:
    """The answer's body. `size` and `output_format` are always filled in (C175)."""
    body: dict[str, Any] = {
        "created": int(created_s),
        "data": [{"b64_json": base64.b64encode(png).decode("ascii")} for png in made.pngs],
        "size": str(size),
        "output_format": "png",
    }
    if made.seed is not None:
        body["seed"] = made.seed
    return body


def models_answer(models: Sequence[str], created_s: float) -> dict[str, Any]:
    """The body of `GET /v1/models`."""
    return {"object": "list", "data": [model_answer(name, created_s) for name in models]}


def model_answer(name: str, created_s: float) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": int(created_s), "owned_by": "tidegate"}
