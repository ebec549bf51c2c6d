"""Gateways that share jobs and tenants' counts over a real Redis."""

from __future__ import annotations

import asyncio
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from light import Light, running

from tidegate.serve.rate import Rate, take
from tidegate.serve.shared_counts import CountsAwayError, SharedCounts
from tidegate.spec.redis import RedisSpec
from tidegate.testing.redis_server import RedisServer
from waiting import wait_until

KEY = "secret-of-acme-0123456789"


def policy(redis: RedisServer, **tenant: Any) -> dict[str, Any]:
    return {
        "serving": {"patience_s": 0.1, "request_deadline_s": 10.0},
        "jobs": {"lease_s": 1.0},
        "gateway_redis": {"address": redis.spec.address, "namespace": uuid.uuid4().hex},
        "tenants": [{"name": "acme", "key_env": "ACME", **tenant}],
    }


@pytest.mark.parametrize("per_min", [1, 60, 7])
@settings(max_examples=15, deadline=None)
@given(steps=st.lists(st.floats(0, 20), max_size=30))
def test_the_script_and_the_rule_say_the_same(redis: RedisServer, per_min: int, steps: list[float]) -> None:
    async def play() -> None:
        counts = SharedCounts(redis.spec, {}, hold_s=9.0)
        caller, rate, due_s, now_s = uuid.uuid4().hex, Rate(per_min), 0.0, 1.7e9
        for step_s in steps:
            now_s += step_s
            due_s, wait_s = take(due_s, rate, now_s)
            said, shared_wait_s = await counts.take(caller, rate, None, "", now_s)
            assert said == ("rate" if wait_s else "in")
            assert shared_wait_s == pytest.approx(wait_s, abs=1e-3)
        await counts.aclose()

    asyncio.run(play())


def test_open_requests_are_counted_over_gateways_and_a_killed_ones_end_with_their_deadline(redis: RedisServer) -> None:
    async def play() -> None:
        one, two = (SharedCounts(redis.spec, {}, hold_s=9.0) for _ in range(2))
        said = [await counts.take("a", None, 2, f"r{n}", 100.0) for n, counts in enumerate((one, two, one))]
        assert [first for first, _ in said] == ["in", "in", "open"]
        await two.leave("a", "r1")
        assert (await one.take("a", None, 2, "r3", 101.0))[0] == "in"
        assert (await two.take("a", None, 2, "r4", 102.0))[0] == "open"
        assert (await two.take("a", None, 2, "r5", 109.5))[0] == "in", "r0 was never given back, and is over"
        for counts in (one, two):
            await counts.aclose()

    asyncio.run(play())


def test_a_redis_that_is_away_is_said_so_at_once() -> None:
    async def play() -> None:
        counts = SharedCounts(RedisSpec(address="127.0.0.1:1"), {}, hold_s=9.0)
        with pytest.raises(CountsAwayError):
            await counts.take("a", None, 2, "r", 100.0)
        await counts.leave("a", "r")
        await counts.aclose()

    asyncio.run(play())


def generate(gateway: Light) -> int:
    url, headers = f"{gateway.url}/v1/images/generations", {"authorization": f"Bearer {KEY}"}
    return httpx.post(url, json={"prompt": "a two"}, headers=headers, timeout=20).status_code


def test_two_gateways_keep_one_limit_and_each_its_own_without_redis(redis: RedisServer, tmp_path: Path) -> None:
    shared = policy(redis, concurrent_max=2)
    gateways = [
        Light(tmp_path / name, policy=shared, env={"ACME": KEY}, arguments=("--latency-s", "0.6")) for name in "ab"
    ]
    with running(gateways[0]), running(gateways[1]), ThreadPoolExecutor(6) as clients:
        said = list(clients.map(generate, gateways * 3))
        assert sorted(said) == [200, 200, 429, 429, 429, 429]
        assert generate(gateways[0]) == 200, "places are given back"
    alone = {**shared, "gateway_redis": {"address": "127.0.0.1:1"}, "jobs": {}}
    gateway = Light(tmp_path / "alone", policy=alone, env={"ACME": KEY}, arguments=("--latency-s", "0.6"))
    with running(gateway), ThreadPoolExecutor(3) as clients:
        assert sorted(clients.map(generate, [gateway] * 3)) == [200, 200, 429]


def test_jobs_outlive_a_killed_gateway_on_another_machine(redis: RedisServer, tmp_path: Path) -> None:
    """Nothing but Redis is common to the two: no folder, no file."""
    shared, env = policy(redis), {"ACME": KEY}
    first = Light(tmp_path / "first", policy=shared, env=env, arguments=("--latency-s", "60"))
    headers = {"authorization": f"Bearer {KEY}"}
    with running(first):
        jobs = f"{first.url}/v1/images/jobs"
        job = httpx.post(jobs, json={"prompt": "a two", "seed": 5}, headers=headers, timeout=20).json()
        wait_until(
            lambda: httpx.get(f"{jobs}/{job['id']}", headers=headers).json()["status"] == "running", 10, "it runs"
        )
        first.kill()
        with running(Light(tmp_path / "second", policy=shared, env=env)) as second:
            url = f"{second.url}/v1/images/jobs/{job['id']}"
            wait_until(lambda: httpx.get(url, headers=headers).json()["status"] == "succeeded", 15, "it is made again")
            assert httpx.get(url, headers=headers).json()["answer"]["seed"] == 5
