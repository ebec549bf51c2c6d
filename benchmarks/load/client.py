"""The load test's clients: an open loop of HTTP requests, every answer checked, every one written down."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

import httpx
from benchmarks.load.asks import SHARES, Ask, Kind, asks
from PIL import Image

from tidegate.serve.api import BODY_LIMIT_BYTES

TIMEOUT_S = 120.0
"""Longer than any deadline of the gateway: who hits it was forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """One ask, as its client saw it."""

    number: int
    kind: Kind
    sent_at_s: float
    took_s: float
    status: int = 0
    """0 = nothing came: its client had left, or see `problem`."""
    code: str | None = None
    """Of an error in OpenAI's shape."""
    backend: str = ""
    request_id: str = ""
    problem: str | None = None
    """What is wrong with what came; None = nothing. A status is not."""


@dataclass(slots=True, kw_only=True)
class Clients:
    """Runs in a thread of its own between `start` and `stop`; `stop` waits for the answers still on their way."""

    url: str
    model: str
    side: int
    """Pixels of the pictures."""
    rate_per_s: float
    seed: int
    log: Path
    shares: Mapping[Kind, float] = field(default_factory=lambda: SHARES)
    sent: int = field(init=False, default=0)
    _stop: threading.Event = field(init=False, default_factory=threading.Event)
    _thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="clients", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    async def _run(self) -> None:
        limits = httpx.Limits(max_connections=2000, max_keepalive_connections=100)
        began_s = time.monotonic()
        with self.log.open("w", encoding="utf-8") as log:
            async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits) as http, asyncio.TaskGroup() as under_way:
                for ask in asks(self.seed, self.rate_per_s, self.shares):
                    while time.monotonic() < began_s + ask.at_s and not self._stop.is_set():
                        await asyncio.sleep(min(0.1, max(0.0, began_s + ask.at_s - time.monotonic())))
                    if self._stop.is_set():
                        break
                    self.sent += 1
                    under_way.create_task(self._ask(http, ask, log))

    async def _ask(self, http: httpx.AsyncClient, ask: Ask, log: TextIO) -> None:
        sent_at_s, begun_s = time.time(), time.monotonic()
        said: dict[str, Any] = {}
        try:
            async with asyncio.timeout(ask.leaves_after_s):
                response = await http.post(f"{self.url}/v1/images/generations", json=self._body(ask))
            said = self._read(response)
        except TimeoutError:
            pass  # it left, as it was to
        except httpx.HTTPError as error:
            said = {"problem": f"{type(error).__name__}: {error}"}
        took_s = time.monotonic() - begun_s
        heard = Heard(number=ask.number, kind=ask.kind, sent_at_s=sent_at_s, took_s=took_s, **said)
        log.write(json.dumps(asdict(heard)) + "\n")

    def _body(self, ask: Ask) -> dict[str, Any]:
        side = 100 * self.side if ask.kind is Kind.BIG_PICTURE else self.side
        prompt = "x" * (BODY_LIMIT_BYTES + 1) if ask.kind is Kind.BIG_BODY else f"number {ask.number}"
        return {"model": self.model, "prompt": prompt, "size": f"{side}x{side}", "seed": ask.number}

    def _read(self, response: httpx.Response) -> dict[str, Any]:
        said: dict[str, Any] = {
            "status": response.status_code,
            "backend": response.headers.get("x-tidegate-backend", ""),
            "request_id": response.headers.get("x-tidegate-request-id", ""),
        }
        try:
            if response.status_code != 200:
                return said | {"code": response.json()["error"]["code"]}
            (item,) = response.json()["data"]
            with Image.open(io.BytesIO(base64.b64decode(item["b64_json"], validate=True))) as image:
                if (image.format, *image.size) != ("PNG", self.side, self.side):
                    return said | {"problem": f"{image.format} of {image.size}"}
        except (ValueError, LookupError, OSError, TypeError) as error:
            return said | {"problem": f"{type(error).__name__}: {error}"}
        return said
