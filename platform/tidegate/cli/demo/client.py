"""A client that never stops asking: a steady rate with bursts, every answer checked, every answer written down."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tidegate.cli.demo.digits import SIZE, caption

RATE_PER_S = 4.0
BURST_EVERY_S = 20.0
BURST_REQUESTS = 8
TIMEOUT_S = 90.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One request as the client saw it."""

    sent_at_s: float
    took_s: float
    status: int
    backend: str
    request_id: str
    problem: str | None
    """What is wrong with the answer; None = nothing."""


class SteadyClient:
    """Runs in a thread of its own between `start` and `stop`; `stop` waits for the answers still on their way."""

    def __init__(self, base_url: str, model: str, log: Path) -> None:
        self._url = f"{base_url}/v1/images/generations"
        self._model = model
        self._log = log
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="client", daemon=True)
        self.recent: deque[Answer] = deque(maxlen=500)
        self.sent = 0
        self.answered = 0
        self.problems: list[Answer] = []

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    async def _run(self) -> None:
        limits = httpx.Limits(max_connections=100)
        async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits) as http:
            under_way: set[asyncio.Task[None]] = set()
            with self._log.open("a", encoding="utf-8") as log:
                started = next_at = next_burst = time.monotonic()
                next_burst += BURST_EVERY_S / 2
                while not self._stop.is_set():
                    now = time.monotonic()
                    count = 0
                    if now >= next_at:
                        next_at += 1 / RATE_PER_S
                        count += 1
                    if now >= next_burst:
                        next_burst += BURST_EVERY_S
                        count += BURST_REQUESTS
                    for _ in range(count):
                        self.sent += 1
                        task = asyncio.create_task(self._ask(http, log, self.sent))
                        under_way.add(task)
                        task.add_done_callback(under_way.discard)
                    await asyncio.sleep(max(0.0, min(next_at, next_burst) - time.monotonic()))
                if under_way:
                    await asyncio.wait(under_way)
                del started

    async def _ask(self, http: httpx.AsyncClient, log: io.TextIOBase, number: int) -> None:
        body = {"model": self._model, "prompt": caption(number % 10), "size": SIZE, "n": 1, "seed": number}
        at_s, begun = time.time(), time.monotonic()
        status, backend, request_id = 0, "", ""
        problem: str | None
        try:
            response = await http.post(self._url, json=body)
            status = response.status_code
            backend = response.headers.get("x-tidegate-backend", "")
            request_id = response.headers.get("x-tidegate-request-id", "")
            problem = check(response, 1)
        except httpx.HTTPError as error:
            problem = f"{type(error).__name__}: {error}"
        answer = Answer(
            sent_at_s=at_s,
            took_s=time.monotonic() - begun,
            status=status,
            backend=backend,
            request_id=request_id,
            problem=problem,
        )
        self.answered += 1
        self.recent.append(answer)
        if problem is not None:
            self.problems.append(answer)
        log.write(json.dumps(asdict(answer)) + "\n")
        log.flush()


def check(response: httpx.Response, count: int) -> str | None:
    """What is wrong with an answer: its status, a picture that is no PNG or has another size, too few of them."""
    if response.status_code != 200:
        return f"status {response.status_code}: {response.text[:300]}"
    try:
        pictures = read_pictures(response)
    except (ValueError, KeyError, OSError) as error:
        return f"not the pictures asked for: {type(error).__name__}: {error}"
    return None if len(pictures) == count else f"{len(pictures)} pictures instead of {count}"


def read_pictures(response: httpx.Response) -> list[NDArray[np.uint8]]:
    """The answer's pictures, each (8, 8).

    Raises:
        ValueError: one is no PNG, or has another size.
    """
    pictures = []
    for item in response.json()["data"]:
        with Image.open(io.BytesIO(base64.b64decode(item["b64_json"], validate=True))) as image:
            if image.format != "PNG" or f"{image.width}x{image.height}" != SIZE:
                raise ValueError(f"{image.format} of {image.width}x{image.height}")
            pictures.append(np.asarray(image.convert("L"), dtype=np.uint8))
    return pictures


def ask_digits(
    base_url: str, model: str, per_class: int, seed: int, classes: Sequence[int] = range(10)
) -> tuple[NDArray[np.uint8], NDArray[np.int64], int]:
    """Ask for `per_class` pictures of each digit through the HTTP endpoint.

    Returns:
        The pictures (N, 8, 8), the digits asked for (N,), and how many requests it took.

    Raises:
        RuntimeError: an answer was wrong.
    """
    pictures: list[NDArray[np.uint8]] = []
    wanted: list[int] = []
    requests = 0
    with httpx.Client(timeout=TIMEOUT_S) as http:
        for digit in classes:
            left = per_class
            while left > 0:
                count = min(left, 10)
                body = {
                    "model": model,
                    "prompt": caption(digit),
                    "size": SIZE,
                    "n": count,
                    "seed": seed + 1000 * digit + left,
                }
                response = http.post(f"{base_url}/v1/images/generations", json=body)
                requests += 1
                problem = check(response, count)
                if problem is not None:
                    raise RuntimeError(f"asked for {count} × {caption(digit)}: {problem}")
                pictures += read_pictures(response)
                wanted += [digit] * count
                left -= count
    return np.stack(pictures), np.array(wanted), requests
