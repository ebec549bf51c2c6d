"""Serve applications for benchmarks: ours with its own gateway, router and pools, and plain ones as a peer has them.

Both have the same light engine: one request at a time, each takes a set number of seconds, no torch.
"""

# No `from __future__ import annotations` here: Serve reads the builders' annotations to check the arguments.

import asyncio
import base64
import io
import time
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from PIL import Image
from pydantic import BaseModel, ConfigDict
from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig
from ray.util import get_node_ip_address
from starlette.requests import Request
from starlette.responses import JSONResponse

from tidegate.ids import NodeId, PoolName
from tidegate.serve.admission import Limits
from tidegate.serve.gateway import Gateway
from tidegate.serve.hop.server import HopServer
from tidegate.serve.pools import pinned, plan_of
from tidegate.serve.replica import MAX_ONGOING
from tidegate.serve.work import ImageJob, Made, Partial, Size
from tidegate.spec.load import load_policy

MODEL = "light"
SIDE = 8
QUIET = LoggingConfig(enable_access_log=False)
"""As our own deployments are; the bare app has it too."""


class LightEngine:
    """What a GPU is in this benchmark: busy with one picture for `service_s`."""

    def __init__(self, service_s: float) -> None:
        self._service_s = service_s
        self._working = asyncio.Lock()
        out = io.BytesIO()
        Image.new("L", (SIDE, SIDE)).save(out, "PNG")
        self.png = out.getvalue()

    async def work(self) -> None:
        async with self._working:
            if self._service_s:
                await asyncio.sleep(self._service_s)


# --- ours -------------------------------------------------------------------------------------------------------


@serve.deployment(max_ongoing_requests=MAX_ONGOING, logging_config=QUIET)
class LightReplica:
    """Stands where `ImagesReplica` does in the images application."""

    async def __init__(self, service_s: float, slots: int) -> None:  # type: ignore[misc]
        self._engine = LightEngine(service_s)
        self._service_s = service_s
        self._hop = HopServer(self, slots)
        self._reached = await self._hop.open(get_node_ip_address())

    def reconfigure(self, config: dict[str, str]) -> None:
        """Names the plan that this was built by; Serve keeps it to show it."""

    def record_replica_metadata(self) -> dict[str, str | int]:
        return self._reached

    async def __del__(self) -> None:
        await self._hop.drain()

    async def make(self, job: ImageJob) -> Made:
        await self._engine.work()
        return Made(pngs=(self._engine.png,) * job.images, seed=job.seed, compute_s=self._service_s)

    async def make_shown(self, job: ImageJob) -> AsyncGenerator[Partial | Made, None]:
        yield await self.make(job)


class ImagesArgs(BaseModel):
    model_config = ConfigDict(extra="forbid")

    policy: str
    service_s: float
    slots: int = MAX_ONGOING
    """Requests that one replica takes at a time."""
    gateways: int = 1


def images(args: ImagesArgs) -> serve.Application:
    """As `serve_apps.images:build`, but for the engine."""
    policy = load_policy(Path(args.policy))
    pool_args: dict[str, str | int | float] = {
        "service_s": args.service_s,
        "drain_s": policy.serving.drain_deadline_s,
        "slots": args.slots,
    }
    gateway = Gateway.options(
        num_replicas=args.gateways, ray_actor_options={"num_cpus": 0}, graceful_shutdown_wait_loop_s=0.1
    )
    plan = plan_of(f"{__name__}:light_pool", pool_args, time.time())
    return gateway.bind(policy, Limits(model=MODEL, sizes=(Size(SIDE, SIDE),)), plan)


def light_pool(node: NodeId, pool: PoolName, args: Mapping[str, Any]) -> serve.Application:
    pinned_here = pinned(LightReplica, node, pool, args["drain_s"])
    return pinned_here.options(max_ongoing_requests=args["slots"]).bind(args["service_s"], args["slots"])


# --- the peer ---------------------------------------------------------------------------------------------------


@serve.deployment(max_ongoing_requests=MAX_ONGOING)
class Worker:
    def __init__(self, service_s: float) -> None:
        self._engine = LightEngine(service_s)

    async def make(self) -> bytes:
        await self._engine.work()
        return self._engine.png


@serve.deployment(max_ongoing_requests=10_000)
class Door:
    """An ingress on CPU, as Serve's documentation has it, so that no GPU replica waits for HTTP connections."""

    def __init__(self, workers: DeploymentHandle) -> None:
        self._workers = workers.options(method_name="make")

    async def __call__(self, request: Request) -> JSONResponse:
        png: bytes = await self._workers.remote()
        return JSONResponse({"data": [{"b64_json": base64.b64encode(png).decode("ascii")}]})


class PeerArgs(BaseModel):
    model_config = ConfigDict(extra="forbid")

    resource: str
    """What a replica takes one of. Not a GPU, so that the arbiter leaves these alone."""
    service_s: float


def peer(args: PeerArgs) -> serve.Application:
    workers = Worker.options(ray_actor_options={"num_cpus": 0, "resources": {args.resource: 1}})
    return Door.options(ray_actor_options={"num_cpus": 0}).bind(workers.bind(args.service_s))


# --- the same shape and nothing else ----------------------------------------------------------------------------


class Wanted(BaseModel):
    """What a plain images app reads of OpenAI's body."""

    model: str
    prompt: str
    size: str
    n: int = 1


_bare_api = FastAPI()


@serve.deployment(max_ongoing_requests=10_000, logging_config=QUIET)
@serve.ingress(_bare_api)
class BareDoor:
    """An ingress on CPU and one hop to a replica, as Serve's documentation has it: no limits, no ledger, no choice.
    Without workers it answers itself: the ingress alone."""

    def __init__(self, workers: DeploymentHandle | None) -> None:
        self._workers = None if workers is None else workers.options(method_name="make")
        self._png = LightEngine(0.0).png

    @_bare_api.post("/v1/images/generations")
    async def generations(self, wanted: Wanted) -> JSONResponse:
        png: bytes = self._png if self._workers is None else await self._workers.remote(wanted)
        return JSONResponse({"data": [{"b64_json": base64.b64encode(png).decode("ascii")}] * wanted.n})


@serve.deployment(logging_config=QUIET)
class BareWorker(LightEngine):
    async def make(self, wanted: Wanted) -> bytes:
        await self.work()
        return self.png


class BareArgs(BaseModel):
    model_config = ConfigDict(extra="forbid")

    replicas: int
    """0: the door answers itself."""
    slots: int
    doors: int = 1


def bare(args: BareArgs) -> serve.Application:
    door = BareDoor.options(num_replicas=args.doors, ray_actor_options={"num_cpus": 0})
    if not args.replicas:
        return door.bind(None)
    workers = BareWorker.options(
        num_replicas=args.replicas, max_ongoing_requests=args.slots, ray_actor_options={"num_cpus": 0}
    )
    return door.bind(workers.bind(0.0))
