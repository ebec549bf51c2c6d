"""The pools of an application on Serve: one deployment for each node, in an application of their own.

They don't stand in the gateways' application: Serve builds one as a whole, and a changed one restarts all that is
in it. Here each deployment keeps its version, so a node that joins or leaves touches no other node's replicas.

Two things are not under Ray's public-API promise (2.60): a deployment's version, and a target of 0 to begin with. They
stand here and nowhere else, and `tests/arbiter/test_on_ray.py` breaks when an upgrade changes them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TypeAlias

from ray import serve

from tidegate.arbiter.messages import PoolPlan
from tidegate.ids import NodeId, PoolName, pool_name, pools_app

PLAN = "plan"
"""In a pool's `user_config`: the version of its plan, where Serve shows it."""

Builder: TypeAlias = Callable[[NodeId, PoolName, Mapping[str, str | int | float]], serve.Application]


class Pools:
    """The ingress that an application must have. It has no address and does nothing: a pool itself can't be the
    ingress, since with HAProxy such a replica gives its GPU up half a minute late."""

    def __init__(self, *pools: object) -> None:
        """Takes the pools only so that they belong to the application."""

    def __call__(self) -> None:
        return None


def lay_pools(app: str, plan: PoolPlan, targets: Mapping[NodeId, int]) -> None:
    """Have exactly one pool for each node of `targets`. Does not wait for replicas.

    Raises:
        ImportError, AttributeError: `plan.builder` does not exist here.
    """
    module, _, function = plan.builder.partition(":")
    build: Builder = getattr(importlib.import_module(module), function)
    pools = []
    for node, target in sorted(targets.items()):
        pool = build(node, pool_name(node), plan.args)._bound_deployment
        pool = pool.options(_internal=True, version=plan.version, user_config={PLAN: plan.version})
        pool._deployment_config.num_replicas = target  # 0 too, which `options` refuses
        pools.append(serve.Application(pool))
    root = serve.deployment(Pools).options(ray_actor_options={"num_cpus": 0}, _internal=True, version="1")
    serve.run_many(
        [
            serve.RunTarget(
                target=root.bind(*pools),
                name=pools_app(app),
                route_prefix=None,
                external_scaler_enabled=True,
            )
        ],
        wait_for_ingress_deployment_creation=False,
        wait_for_applications_running=False,
    )


def take_pools_away(app: str) -> None:
    serve.delete(pools_app(app), _blocking=False)
