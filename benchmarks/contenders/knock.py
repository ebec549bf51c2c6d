"""The one client of every contender at the gateway: seconds of single requests, and requests a second of many."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import uvloop


class WrongAnswerError(RuntimeError):
    """An answer was not the picture asked for: its seconds would say nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knocked:
    """One contender in one round."""

    p50_s: float
    p99_s: float
    """Of requests that came one after the other."""
    requests_per_s: float
    """With `callers` that each ask again as soon as they are answered."""


def knock(url: str, body: Mapping[str, Any], *, singles: int, callers: int, seconds: float) -> Knocked:
    """
    Raises:
        WrongAnswerError: an answer was no picture.
    """
    return uvloop.run(_knock(url, body, singles, callers, seconds))


async def _knock(url: str, body: Mapping[str, Any], singles: int, callers: int, seconds: float) -> Knocked:
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=callers), timeout=aiohttp.ClientTimeout(total=60)
    ) as http:
        for _ in range(20):  # connections, routers and caches
            await _ask(http, url, body)
        took_s = []
        for _ in range(singles):
            begun_s = time.perf_counter()
            await _ask(http, url, body)
            took_s.append(time.perf_counter() - begun_s)
        await _crowd(http, url, body, callers, seconds / 5)
        begun_s = time.perf_counter()
        answered = await _crowd(http, url, body, callers, seconds)
        rate = answered / (time.perf_counter() - begun_s)
    percentiles = statistics.quantiles(took_s, n=100, method="inclusive")
    return Knocked(p50_s=percentiles[49], p99_s=percentiles[98], requests_per_s=rate)


async def _crowd(http: aiohttp.ClientSession, url: str, body: Mapping[str, Any], callers: int, seconds: float) -> int:
    until_s = time.perf_counter() + seconds

    async def caller() -> int:
        answered = 0
        while time.perf_counter() < until_s:
            await _ask(http, url, body)
            answered += 1
        return answered

    return sum(await asyncio.gather(*(caller() for _ in range(callers))))


async def _ask(http: aiohttp.ClientSession, url: str, body: Mapping[str, Any]) -> None:
    async with http.post(url, json=body) as response:
        said = await response.read()
        if response.status != 200 or b'"b64_json"' not in said:
            raise WrongAnswerError(f"{url}: status {response.status}: {said[:300]!r}")
