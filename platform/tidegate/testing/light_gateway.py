"""A gateway without Ray: the real door, flow, ledger and providers over HTTP; only the GPU is light.

    python -m tidegate.testing.light_gateway --port 8902 --policy policy.yaml --latency-s 0.05

Its replicas draw the coloured boxes of the stand-in provider: the same prompt and seed give the same picture.
"""

from __future__ import annotations

import asyncio
import io
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated

import typer
import uvicorn
from fastapi import FastAPI
from PIL import Image

from tidegate.clock import SystemClock
from tidegate.ids import GatewayId, PoolName, ProviderName
from tidegate.serve.admission import Limits, parse_size
from tidegate.serve.backends import Backends, PoolSeen
from tidegate.serve.callers import open_callers
from tidegate.serve.desk import Desk
from tidegate.serve.door import Door
from tidegate.serve.flow import Flow, Showing
from tidegate.serve.job_opening import open_jobs
from tidegate.serve.ledger import Ledger, Outcome
from tidegate.serve.providers import connect
from tidegate.serve.routes import build_api
from tidegate.serve.work import ImageJob, Made, Partial, PoolBusyError, PoolLostError
from tidegate.spec.load import load_policy
from tidegate.spec.policy import Policy
from tidegate.testing.standin_studio import draw

POOL = PoolName("pool-light")


class LightPools:
    """One pool of `replicas`, each of which draws one request at a time and holds one more."""

    def __init__(self, replicas: int, latency_s: float) -> None:
        self.replicas, self.latency_s = replicas, latency_s
        self.ongoing = 0
        self._at_work = asyncio.Semaphore(max(1, replicas))

    def seen(self) -> dict[PoolName, PoolSeen]:
        return {POOL: PoolSeen(self.replicas, self.ongoing, slots_each=2)}

    async def make_shown(self, pool: PoolName, job: ImageJob, timeout_s: float, show: Showing) -> Made:
        """Unfinished pictures are smaller ones. After the first of them a `torn` prompt loses its replica, and an
        `endless` one never ends."""
        made = await self.make(pool, job, timeout_s)
        for image, png in enumerate(made.pngs):
            for index in range(job.partial_images):
                await show(Partial(image=image, index=index, png=_smaller(png), steps_done=index + 1, steps=4))
                if job.prompt == "torn":
                    raise PoolLostError("torn")
                if job.prompt == "endless":
                    await asyncio.Event().wait()
        return made

    async def make(self, pool: PoolName, job: ImageJob, timeout_s: float) -> Made:
        if self.ongoing >= 2 * self.replicas:
            raise PoolBusyError(pool)
        self.ongoing += 1
        try:
            async with asyncio.timeout(timeout_s), self._at_work:
                await asyncio.sleep(self.latency_s)
                seeds = range(job.seed, job.seed + job.images)
                pngs = tuple(draw(job.prompt, seed, job.size.width, job.size.height) for seed in seeds)
                return Made(pngs=pngs, seed=job.seed, compute_s=self.latency_s)
        finally:
            self.ongoing -= 1


def _smaller(png: bytes) -> bytes:
    out = io.BytesIO()
    with Image.open(io.BytesIO(png)) as image:
        image.reduce(2).save(out, "PNG")
    return out.getvalue()


class NoCounts:
    """Ray's metrics need Ray; the ledger says the same."""

    def count(self, outcome: Outcome, backend: str | None, took_s: float) -> None:
        pass


def build_app(policy: Policy, limits: Limits, pools: LightPools, name: str) -> FastAPI:
    """The gateway's routes; what they hold is closed when the app's lifespan ends."""
    clock = SystemClock()
    callers = open_callers(policy, os.environ)
    ledger = Ledger(policy.arbiter.state_path / "ledger", GatewayId(name))
    backends = Backends(policy.providers, pools.seen)
    providers = {ProviderName(spec.name): connect(spec) for spec in policy.providers}
    flow = Flow(policy.serving, backends, pools, providers, ledger, clock)
    desk = Desk(limits, flow, ledger, NoCounts(), clock)
    jobs = open_jobs(policy, desk, callers, GatewayId(name))
    api = build_api(Door(desk, backends, clock, callers, jobs, started_at_s=clock.now_s()))

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        jobs.start()
        yield
        await jobs.aclose()
        await callers.aclose()
        for provider in providers.values():
            await provider.aclose()
        ledger.close()

    api.router.lifespan_context = life
    return api


def main(
    port: Annotated[int, typer.Option(help="On the loopback address.")],
    policy: Annotated[Path, typer.Option(help="A policy.yaml; its state_dir holds the ledger.")],
    latency_s: Annotated[float, typer.Option(help="Seconds that one request takes on a replica.")] = 0.02,
    replicas: Annotated[int, typer.Option(help="0 = only providers answer.")] = 2,
    sizes: Annotated[str, typer.Option(help="WxH, separated by commas; the first is the default.")] = "16x16,32x16",
    model: Annotated[str, typer.Option(help="The only model that it serves.")] = "tidegate-digits",
    name: Annotated[str, typer.Option(help="Of this gateway: names its ledger.")] = "light",
    waiting_max: Annotated[int, typer.Option(help="Requests that may wait.")] = 100,
) -> None:
    """Serve until SIGTERM."""
    logging.basicConfig(level=logging.INFO)
    limits = Limits(
        model=model,
        sizes=tuple(parse_size(size) for size in sizes.split(",")),
        quality_steps={"low": 8, "high": 28},
        waiting_max=waiting_max,
    )
    app = build_app(load_policy(policy), limits, LightPools(replicas, latency_s), name)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning", access_log=False, timeout_graceful_shutdown=1)


if __name__ == "__main__":
    typer.run(main)
