"""How a pool of replicas is built, and the gateway's way to those that there are."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import TypeAdapter
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from tidegate.arbiter.messages import PoolPlan
from tidegate.ids import POOL_PREFIX, NodeId, PoolName, pools_app
from tidegate.serve import replica_registry
from tidegate.serve.backends import PoolSeen
from tidegate.serve.flow import Showing
from tidegate.serve.hop.client import Lines
from tidegate.serve.options import EngineOptions
from tidegate.serve.replica import ImagesReplica
from tidegate.serve.replica_registry import ReplicaAddress
from tidegate.serve.work import ImageJob, Made
from tidegate.spec.weights import RolloutSpec

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
    rollout: RolloutSpec,
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
        "rollout": rollout.model_dump_json(),
        "requests_per_replica": requests_per_replica,
        "stuck_after_s": stuck_after_s,
        "drain_s": drain_s,
    }
    return plan_of(f"{__name__}:images_pool", args, at_s)


def images_pool(node: NodeId, pool: PoolName, args: Mapping[str, Any]) -> serve.Application:
    here = pinned(ImagesReplica, node, pool, args["drain_s"])
    options, rollout = _OPTIONS.validate_json(args["options"]), RolloutSpec.model_validate_json(args["rollout"])
    return here.options(max_ongoing_requests=args["requests_per_replica"]).bind(
        args["app"], args["weights"], options, rollout, args["stuck_after_s"], args["requests_per_replica"]
    )


def pinned(replica: serve.Deployment, node: NodeId, pool: PoolName, drain_s: float) -> serve.Deployment:
    """A deployment whose replicas, one a GPU, stand on `node` and nowhere else, behind our router."""
    pinned: serve.Deployment = replica.options(
        name=pool,
        ray_actor_options={"num_cpus": 0, "num_gpus": 1, "label_selector": {"ray.io/node-id": node}},
        request_router_config=RequestRouterConfig(
            request_router_class="tidegate.serve.router:ReplicaWatch", request_router_kwargs={"pool": pool}
        ),
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=drain_s,
    )
    return pinned


class RayPools:
    """The pools of images replicas, by a line to each replica. They come and go with the nodes. Of one event loop."""

    def __init__(self, app: str) -> None:
        self._app = pools_app(app)
        self._handles: dict[PoolName, DeploymentHandle] = {}
        """No request goes by them: with each comes a router, which hears from Serve what replicas there are."""
        self._lines = Lines()
        self._loop = asyncio.get_running_loop()
        replica_registry.LISTENERS.append(self._told)

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
            # `.options` makes the router now.
            self._handles[name] = handle.options(method_name="make")
            self._lines.follow(name, ())
        seen = self.seen()
        for name in set(self._handles).difference(names) if names else ():
            if not seen[name].replicas:
                self._lines.forget(name)
                self._closing = asyncio.get_running_loop().create_task(self._handles.pop(name).shutdown_async())

    def _told(self, pool: PoolName, replicas: tuple[ReplicaAddress, ...]) -> None:
        """By a router, in its thread."""
        self._loop.call_soon_threadsafe(self._listed, pool, replicas)

    def _listed(self, pool: PoolName, replicas: tuple[ReplicaAddress, ...]) -> None:
        if pool in self._handles:
            self._lines.follow(pool, replicas)

    def seen(self) -> Mapping[PoolName, PoolSeen]:
        """Each pool now."""
        return self._lines.seen()

    async def make(self, pool: PoolName, job: ImageJob, timeout_s: float) -> Made:
        async with asyncio.timeout(timeout_s):
            return await self._lines.pick(pool).make(job)

    async def make_shown(self, pool: PoolName, job: ImageJob, timeout_s: float, show: Showing) -> Made:
        async with asyncio.timeout(timeout_s):
            return await self._lines.pick(pool).make_shown(job, show)

    def close(self) -> None:
        """Hang up, after what is under way."""
        replica_registry.LISTENERS.remove(self._told)
        self._lines.close()
