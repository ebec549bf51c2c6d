"""A steady load of HTTP requests, every answer checked."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

TIMEOUT_S = 120.0


@dataclass(slots=True)
class Load:
    """Between `start` and `stop` a request every 1/`rate_per_s` seconds; `finish` waits for the answers."""

    url: str
    body: dict[str, Any]
    rate_per_s: float
    sent: int = field(init=False, default=0)
    problems: list[str] = field(init=False, default_factory=list)
    """What was wrong with each request that was not answered as it should be."""
    _stop: threading.Event = field(init=False, default_factory=threading.Event)
    _thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="load", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def finish(self) -> None:
        self._stop.set()
        self._thread.join()

    async def _run(self) -> None:
        async with httpx.AsyncClient(timeout=TIMEOUT_S) as http, asyncio.TaskGroup() as under_way:
            next_at = time.monotonic()
            while not self._stop.is_set():
                under_way.create_task(self._ask(http))
                self.sent += 1
                next_at += 1 / self.rate_per_s
                await asyncio.sleep(max(0.0, next_at - time.monotonic()))

    async def _ask(self, http: httpx.AsyncClient) -> None:
        try:
            response = await http.post(self.url, json=self.body)
            if response.status_code != 200 or not response.json()["data"][0]["b64_json"]:
                self.problems.append(f"status {response.status_code}: {response.text[:200]}")
        except (httpx.HTTPError, ValueError, LookupError) as error:
            self.problems.append(f"{type(error).__name__}: {error}")
