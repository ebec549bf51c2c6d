"""OpenAI's images API on the wire: what a body may hold, how an answer and an error look.

Source of the shapes: OpenAI API reference, `images/generations` and `errors`; the `openai` Python client reads both
unchanged. The diffusion fields stand at top level as in SGLang and vLLM-Omni; `local_only` is ours (in the client:
`extra_body`).
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

BODY_LIMIT_BYTES = 256 * 1024
"""A prompt and a few numbers; anything bigger isn't read."""


class ImagesBody(BaseModel):
    """The body of `POST /v1/images/generations` as the client wrote it. Bounds are admission's.

    Every field of OpenAI's reference is known here, so that one which can't be honoured is refused by its name.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    prompt: str
    model: str | None = None
    n: int | None = None
    size: str | None = None
    width: int | None = None
    height: int | None = None
    response_format: str | None = None
    output_format: str | None = None
    output_compression: int | None = None
    quality: str | None = None
    style: str | None = None
    background: str | None = None
    moderation: str | None = None
    stream: bool | None = None
    partial_images: int | None = None
    negative_prompt: str | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    seed: int | None = None
    local_only: bool | None = None
    hedge: bool | None = None
    complexity: str | None = None
    frame_count: int | None = None
    frame_duration_ms: int | None = None
    svg: dict[str, Any] | None = None
    # Names of the caller's own users: for abuse reports, not for the model. They are kept nowhere.
    user: str | None = Field(default=None, repr=False)
    safety_identifier: str | None = Field(default=None, repr=False)


B = TypeVar("B", bound=BaseModel)


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
        kind = _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """`Retry-After` in whole seconds (RFC 9110, 10.2.3), rounded up, at least 1; and OpenAI's own word for clients
        that would retry by themselves."""
        headers = {} if self.retry else {"x-should-retry": "false"}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
        return headers


_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def parse_body(raw: bytes, model: type[B]) -> B:
    """Read a request's body as `model`.

    Raises:
        ApiError: 400 that names the field and the fix.
    """
    try:
        text = raw.decode("utf-8")
        value = json.loads(text, parse_constant=_not_json)
        if "\\u" in text:
            # An escape can write half of a surrogate pair: valid JSON, and no text that could ever be stored or sent.
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError):
        raise ApiError(400, "the body must be a JSON object in UTF-8", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be a JSON object, got {type(value).__name__}", code="invalid_json")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _refusal(error.errors()[0], value, model) from None


def _not_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _refusal(problem: Any, value: Mapping[str, Any], model: type[BaseModel]) -> ApiError:
    field = ".".join(str(part) for part in problem["loc"])[:100] or None
    if problem["type"] == "missing":
        return ApiError(400, f"missing required parameter: '{field}'", param=field, code="missing_required_parameter")
    if problem["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(field), model.model_fields, n=1, cutoff=0.6)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        return ApiError(400, f"unknown parameter: '{field}'{hint}", param=field, code="unknown_parameter")
    got = repr(value.get(str(field)))[:60]
    why = str(problem["msg"])
    return ApiError(400, f"'{field}': {why[0].lower()}{why[1:]}, got {got}", param=field, code="invalid_type")


def models_answer(models: Sequence[str], created_s: float) -> dict[str, Any]:
    """The body of `GET /v1/models`."""
    return {"object": "list", "data": [model_answer(name, created_s) for name in models]}


def model_answer(name: str, created_s: float) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": int(created_s), "owned_by": "tidegate"}
