"""A stand-in for a provider: a real HTTP process that speaks OpenAI's images API and draws cheap pictures.

    python -m tidegate.testing.standin_provider --port 8901 --latency-s 0.2 --slots 8

`POST /control` scripts faults and settings, `GET /stats` counts. Every answer carries `x-tidegate-stand-in: true`: its
pictures are coloured boxes, not a model's work.
"""

from __future__ import annotations

import asyncio
import base64
import io
import random
import re
import time
from collections import Counter
from enum import StrEnum
from typing import Annotated, Any

import typer
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from PIL import Image, ImageDraw
from pydantic import BaseModel, ConfigDict, Field
from starlette.types import Receive, Scope, Send

_MARK = {"x-tidegate-stand-in": "true"}
_SIZE = re.compile(r"([1-9][0-9]{0,3})x([1-9][0-9]{0,3})")


class Fault(StrEnum):
    STATUS = "status"
    """Answer with `status` (and `retry_after`)."""
    DROP = "drop"
    """Make the picture, then cut the connection before the body."""
    HANG = "hang"
    """Never answer."""
    EMPTY = "empty"
    """Status 200 with `data: []`."""
    WRONG_SIZE = "wrong_size"
    """Status 200 with pictures of 8x8 more than asked."""


class Asked(BaseModel):
    """The part of OpenAI's body that it reads."""

    model_config = ConfigDict(extra="allow")

    prompt: str
    model: str
    n: Annotated[int, Field(ge=1, le=10)] = 1
    size: str = "1024x1024"
    seed: int | None = None


class Control(BaseModel):
    """What to do from now on. Fields that are not named stay as they are."""

    model_config = ConfigDict(extra="forbid")

    fault: Fault | None = None
    times: Annotated[int, Field(ge=0)] = 1
    """How many requests get `fault`; 0 takes back what is left of the last one."""
    status: int = 500
    retry_after: str | None = None
    latency_s: Annotated[float, Field(ge=0)] | None = None
    slots: Annotated[int, Field(ge=1)] | None = None
    refuse_response_format: bool | None = None
    """As OpenAI's newer image models do."""


class StandIn:
    """The provider's state; single-threaded like its event loop."""

    def __init__(self, model: str, latency_s: float, slots: int) -> None:
        self.model, self.latency_s, self.slots = model, latency_s, slots
        self.refuse_response_format = False
        self.ongoing = 0
        self.counts: Counter[str] = Counter()
        self.keys: Counter[str] = Counter()
        self.script = Control(times=0)
        self.faults_left = 0

    def control(self, order: Control) -> None:
        self.latency_s = self.latency_s if order.latency_s is None else order.latency_s
        self.slots = self.slots if order.slots is None else order.slots
        if order.refuse_response_format is not None:
            self.refuse_response_format = order.refuse_response_format
        if order.fault is not None:
            self.script, self.faults_left = order, order.times

    def stats(self) -> dict[str, Any]:
        names = ("requests", "answered", "refused", "images", "faults")
        bought_twice = sum(1 for times in self.keys.values() if times > 1)
        return {name: self.counts[name] for name in names} | {
            "ongoing": self.ongoing,
            "ongoing_max": self.counts["ongoing_max"],
            "bought_twice": bought_twice,
            "slots": self.slots,
        }

    async def generate(self, asked: Asked, key: str | None) -> Response:
        self.counts["requests"] += 1
        if asked.model != self.model:
            return self._refuse(404, f"the model '{asked.model}' does not exist", "model", "model_not_found")
        if self.refuse_response_format and "response_format" in (asked.model_extra or {}):
            return self._refuse(400, "unknown parameter: 'response_format'", "response_format", "unknown_parameter")
        match = _SIZE.fullmatch(asked.size)
        if match is None:
            return self._refuse(400, f"size must be WxH, got '{asked.size}'", "size", "invalid_value")
        if self.ongoing >= self.slots:
            return self._refuse(429, f"all {self.slots} slots are taken", None, "rate_limit_exceeded", "1")
        fault = self._next_fault()
        self.ongoing += 1
        self.counts["ongoing_max"] = max(self.counts["ongoing_max"], self.ongoing)
        try:
            if fault is Fault.HANG:
                return _Hang()
            if fault is Fault.STATUS:
                return self._refuse(self.script.status, "scripted fault", None, "fault", self.script.retry_after)
            await asyncio.sleep(self.latency_s)
            return self._made(asked, (int(match[1]), int(match[2])), key, fault)
        finally:
            self.ongoing -= 1

    def _next_fault(self) -> Fault | None:
        if not self.faults_left:
            return None
        self.faults_left -= 1
        self.counts["faults"] += 1
        return self.script.fault

    def _made(self, asked: Asked, size: tuple[int, int], key: str | None, fault: Fault | None) -> Response:
        if fault is Fault.EMPTY:
            return JSONResponse({"created": int(time.time()), "data": []}, headers=_MARK)
        grow = 8 if fault is Fault.WRONG_SIZE else 0
        first = random.randrange(2**31) if asked.seed is None else asked.seed
        pngs = [draw(asked.prompt, first + i, size[0] + grow, size[1] + grow) for i in range(asked.n)]
        self.counts["answered"] += 1
        self.counts["images"] += asked.n
        if key is not None:
            self.keys[key] += 1
        if fault is Fault.DROP:
            return _Cut()
        data = [{"b64_json": base64.b64encode(png).decode("ascii")} for png in pngs]
        body = {"created": int(time.time()), "data": data, "size": asked.size, "output_format": "png"}
        return JSONResponse(body, headers=_MARK)

    def _refuse(
        self, status: int, message: str, param: str | None, code: str, retry_after: str | None = None
    ) -> Response:
        self.counts["refused"] += 1
        headers = _MARK if retry_after is None else {**_MARK, "retry-after": retry_after}
        kind = "invalid_request_error" if status < 429 else "server_error"
        error = {"message": message, "type": kind, "param": param, "code": code}
        return JSONResponse({"error": error}, status_code=status, headers=headers)


class _Hang(Response):
    """Never answers; ends when the client leaves."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass


class _Cut(Response):
    """Promises a body and returns without it, upon which uvicorn closes the connection."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"application/json"), (b"content-length", b"1000")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"{", "more_body": True})


def draw(prompt: str, seed: int, width: int, height: int) -> bytes:
    """A PNG of coloured boxes; equal prompt and seed give equal bytes."""
    dice = random.Random(f"{prompt}|{seed}")
    image = Image.new("RGB", (width, height), tuple(dice.randrange(256) for _ in range(3)))
    pen = ImageDraw.Draw(image)
    for _ in range(3):
        left, top = dice.randrange(width), dice.randrange(height)
        right, bottom = left + dice.randrange(1 + width // 2), top + dice.randrange(1 + height // 2)
        pen.rectangle((left, top, right, bottom), fill=tuple(dice.randrange(256) for _ in range(3)))
    out = io.BytesIO()
    image.save(out, "PNG", compress_level=1)
    return out.getvalue()


def build_app(stand_in: StandIn) -> FastAPI:
    app = FastAPI(title="tidegate stand-in provider", openapi_url=None)

    @app.post("/v1/images/generations")
    async def generations(asked: Asked, request: Request) -> Response:
        return await stand_in.generate(asked, request.headers.get("idempotency-key"))

    @app.post("/control")
    async def control(order: Control) -> dict[str, Any]:
        stand_in.control(order)
        return stand_in.stats()

    @app.get("/stats")
    async def stats() -> dict[str, Any]:
        return stand_in.stats()

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    return app


def main(
    port: Annotated[int, typer.Option(help="On the loopback address.")],
    latency_s: Annotated[float, typer.Option(help="Seconds that one request takes.")] = 0.2,
    slots: Annotated[int, typer.Option(help="Requests at a time; above it answers 429.")] = 8,
    model: Annotated[str, typer.Option(help="The only model that it knows.")] = "stand-in-image",
) -> None:
    """Serve until SIGTERM."""
    app = build_app(StandIn(model, latency_s, slots))
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning", access_log=False, timeout_graceful_shutdown=1)


if __name__ == "__main__":
    typer.run(main)
