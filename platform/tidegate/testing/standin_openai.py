"""The stand-in's face that speaks OpenAI's images API."""

from __future__ import annotations

import base64
import re
import time
from typing import Annotated

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from tidegate.testing.standin_studio import BusyError, Fault, Order, Studio
from tidegate.testing.standin_wire import MARK, Cut, Drip, Hang, Reset

_SIZE = re.compile(r"([1-9][0-9]{0,3})x([1-9][0-9]{0,3})")


class Asked(BaseModel):
    """The part of OpenAI's body that it reads."""

    model_config = ConfigDict(extra="allow")

    prompt: str
    model: str
    n: Annotated[int, Field(ge=1, le=10)] = 1
    size: str = "1024x1024"
    seed: int | None = None


def add_openai(app: FastAPI, studio: Studio) -> None:
    @app.post("/v1/images/generations")
    async def generations(asked: Asked, request: Request) -> Response:
        studio.counts["requests"] += 1
        if studio.key and request.headers.get("authorization") != f"Bearer {studio.key}":
            return _refuse(studio, 401, "incorrect API key provided", None, "invalid_api_key")
        if asked.model != studio.model:
            return _refuse(studio, 404, f"the model '{asked.model}' does not exist", "model", "model_not_found")
        if studio.refuse_response_format and "response_format" in (asked.model_extra or {}):
            return _refuse(studio, 400, "unknown parameter: 'response_format'", "response_format", "unknown_parameter")
        match = _SIZE.fullmatch(asked.size)
        if match is None:
            return _refuse(studio, 400, f"size must be WxH, got '{asked.size}'", "size", "invalid_value")
        return await _answer(studio, asked, int(match[1]), int(match[2]), request.headers.get("idempotency-key"))


async def _answer(studio: Studio, asked: Asked, width: int, height: int, key: str | None) -> Response:
    if studio.ongoing >= studio.slots:
        return _busy(studio)
    fault = studio.next_fault()
    if fault is Fault.HANG:
        return Hang()
    if fault is Fault.RESET:
        return Reset()
    if fault is Fault.STATUS:
        script = studio.script
        return _refuse(studio, script.status, "scripted fault", None, "fault", script.retry_after)
    order = Order(prompt=asked.prompt, images=asked.n, width=width, height=height, seed=asked.seed, key=key)
    try:
        pngs = await studio.work_now(order, fault)
    except BusyError:
        return _busy(studio)
    if fault is Fault.FAIL:
        return _refuse(studio, 500, "the server had an error while processing your request", None, "server_error")
    if fault is Fault.DROP:
        return Cut()
    data = [{"b64_json": base64.b64encode(png).decode("ascii")} for png in pngs]
    body = JSONResponse(
        {"created": int(time.time()), "data": data, "size": asked.size, "output_format": "png"}, headers=MARK
    )
    return Drip(bytes(body.body), headers=MARK, media_type="application/json") if fault is Fault.DRIP else body


def _busy(studio: Studio) -> Response:
    return _refuse(studio, 429, f"all {studio.slots} slots are taken", None, "rate_limit_exceeded", "1")


def _refuse(
    studio: Studio, status: int, message: str, param: str | None, code: str, retry_after: str | None = None
) -> Response:
    studio.counts["refused"] += 1
    headers = MARK if retry_after is None else {**MARK, "retry-after": retry_after}
    kind = "invalid_request_error" if status < 429 else "server_error"
    error = {"message": message, "type": kind, "param": param, "code": code}
    return JSONResponse({"error": error}, status_code=status, headers=headers)
