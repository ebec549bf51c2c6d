"""How a pool of replicas is built, and the gateway's handles to those that there are."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from pydantic import TypeAdapter
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponse, DeploymentResponseGenerator

from tidegate.arbiter.messages import PoolPlan
from tidegate.ids import POOL_PREFIX, NodeId, PoolName, pools_app
from tidegate.serve import router_registry
from tidegate.serve.flow import Showing
from tidegate.serve.options import EngineOptions
from tidegate.serve.replica import ImagesReplica
from tidegate.serve.work import EngineFailedError, ImageJob, Made, Partial, PoolBusyError, PoolLostError, UnfitError

_LOG = logging.getLogger("ray.serve")

_OPTIONS = TypeAdapter(EngineOptions)


def plan_of(builder: str, args: Mapping[str, str | int | float], at_s: float) -> PoolPlan:
    """`builder`: see `PoolPlan`; `at_s`: now."""
    said = json.dumps([builder, args], sort_keys=True)
    return PoolPlan(builder=builder, args=args, version=hashlib.sha256(said.encode()).hexdigest()[:12], at_s=at_s)


def images_plan(
    app: str,
    weights: str,
    options: EngineOptions,
    requests_per_replica: int,
    stuck_after_s: float,
    drain_s: float,
    at_s: float,
) -> PoolPlan:
    """Of pools whose replicas are `ImagesReplica`s."""
    args: dict[str, str | int | float] = {
        "app": app,
        "weights": weights,
        "options": _OPTIONS.dump_json(options).decode(),
        "requests_per_replica": requests_per_replica,
        "stuck_after_s": stuck_after_s,
        "drain_s": drain_s,
    }
    return plan_of(f"{__name__}:images_pool", args, at_s)


def images_pool(node: NodeId, pool: PoolName, args: Mapping[str, Any]) -> serve.Application:
    here = pinned(ImagesReplica, node, pool, args["drain_s"])
    options = _OPTIONS.validate_json(args["options"])
    return here.options(max_ongoing_requests=args["requests_per_replica"]).bind(
        args["app"], args["weights"], options, args["stuck_after_s"]
    )


def pinned(replica: serve.Deployment, node: NodeId, pool: PoolName, drain_s: float) -> serve.Deployment:
    """A deployment whose replicas, one a GPU, stand on `node` and nowhere else, behind our router."""
    pinned: serve.Deployment = replica.options(
        name=pool,
        ray_actor_options={"num_cpus": 0, "num_gpus": 1, "label_selector": {"ray.io/node-id": node}},
        request_router_config=RequestRouterConfig(
            request_router_class="tidegate.serve.router:SpillRouter", request_router_kwargs={"pool": pool}
        ),
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=drain_s,
    )
    return pinned


class RayPools:
    """The pools of images replicas, by Serve handle. They come and go with the nodes."""

    def __init__(self, app: str) -> None:
        self._app = pools_app(app)
        self._handles: dict[PoolName, DeploymentHandle] = {}

    async def find(self) -> None:
        """Look which pools there are: for a gateway that starts while the arbiter is away."""
        try:
            status = await asyncio.to_thread(serve.status)
        except (RayError, RayServeException):
            _LOG.warning("Serve does not say which pools there are: the arbiter will", exc_info=True)
            return
        found = status.applications.get(self._app)
        self.follow(PoolName(name) for name in (found.deployments if found else ()) if name.startswith(POOL_PREFIX))

    def follow(self, named: Iterable[PoolName]) -> None:
        """Take up the named pools; let those go that are not named and have no replica left. Nothing named is no
        news."""
        names = frozenset(named)
        for name in names.difference(self._handles):
            # Unchecked: the check is a call to the controller, and an unknown pool is only one without replicas.
            handle = serve.get_deployment_handle(name, self._app, _check_exists=False)
            # `.options` makes the router now, so that it is known before the first request.
            self._handles[name] = handle.options(method_name="make")
        for name in set(self._handles).difference(names) if names else ():
            router = router_registry.ROUTERS.get(name)
            if router is None or not router.seen().replicas:
                router_registry.ROUTERS.pop(name, None)
                self._closing = asyncio.get_running_loop().create_task(self._handles.pop(name).shutdown_async())

    async def make(self, pool: PoolName, job: ImageJob, timeout_s: float) -> Made:
        response = self._handle(pool).remote(job)
        async with _answering(pool, response, timeout_s):
            made: Made = await response
        return made

    async def make_shown(self, pool: PoolName, job: ImageJob, timeout_s: float, show: Showing) -> Made:
        response = self._handle(pool).options(method_name="make_shown", stream=True).remote(job)
        async with _answering(pool, response, timeout_s):
            async for item in response:
                if isinstance(item, Made):
                    return item
                await show(item)
        raise PoolLostError("the replica's stream ended without a picture")

    def _handle(self, pool: PoolName) -> DeploymentHandle:
        try:
            return self._handles[pool]
        except KeyError:  # it has just gone
            raise PoolBusyError(pool) from None


@asynccontextmanager
async def _answering(
    pool: PoolName, response: DeploymentResponse[Made] | DeploymentResponseGenerator[Made | Partial], timeout_s: float
) -> AsyncIterator[None]:
    """Says in the room's own errors what went wrong with an answer, and takes the request back where nobody waits."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except (asyncio.CancelledError, TimeoutError):
        response.cancel()  # else the replica would finish a picture that nobody waits for
        raise
    except RayTaskError as error:  # the replica's own code raised
        if isinstance(error.cause, UnfitError):
            raise error.cause from None
        raise EngineFailedError(str(error.cause)[:300]) from None
    except BackPressureError:
        raise PoolBusyError(pool) from None
    except (RayError, DeploymentUnavailableError) as error:
        raise PoolLostError(f"{type(error).__name__}: {error}"[:300]) from None
