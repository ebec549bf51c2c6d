"""The door as a Serve deployment on CPU: it speaks OpenAI's images API and sends each request where it can be made."""

from __future__ import annotations

import asyncio
import os

from fastapi import FastAPI
from ray import serve
from ray.serve.schema import LoggingConfig

from tidegate.arbiter.client import ArbiterClient
from tidegate.arbiter.messages import PoolPlan
from tidegate.clock import SystemClock
from tidegate.ids import GatewayId, ProviderName
from tidegate.serve.admission import Limits
from tidegate.serve.arbiter_link import ArbiterLink, canary_job
from tidegate.serve.backends import Backends
from tidegate.serve.callers import open_callers
from tidegate.serve.canaries import Canaries
from tidegate.serve.desk import Desk
from tidegate.serve.door import Door
from tidegate.serve.flow import Flow
from tidegate.serve.job_opening import open_jobs
from tidegate.serve.ledger import Ledger
from tidegate.serve.pools import RayPools
from tidegate.serve.providers import connect
from tidegate.serve.routes import build_api
from tidegate.serve.tally import Tally
from tidegate.spec.policy import Policy


# The ledger says more of a request than Serve's access log, which costs time in each.
@serve.deployment(max_ongoing_requests=10_000, logging_config=LoggingConfig(enable_access_log=False))
@serve.ingress()
class Gateway:
    def __init__(self, policy: Policy, limits: Limits, plan: PoolPlan) -> None:
        gateway = GatewayId(serve.get_replica_context().replica_id.unique_id)
        clock, tally = SystemClock(), Tally()
        callers = self._callers = open_callers(policy, os.environ)
        self._ledger = Ledger(policy.arbiter.state_path / "ledger", gateway)
        pools = self._pools = RayPools(policy.serving.app)
        backends = Backends(policy.providers, pools.seen)
        self._providers = {ProviderName(spec.name): connect(spec) for spec in policy.providers}
        flow = Flow(policy.serving, backends, pools, self._providers, self._ledger, clock)
        desk = Desk(limits, flow, self._ledger, tally, clock)
        self._jobs = open_jobs(policy, desk, callers, gateway)
        self._jobs.start()
        self._door = Door(desk, backends, clock, callers, self._jobs, started_at_s=clock.now_s())
        canaries = Canaries(
            policy.canary,
            self._providers,
            flow,
            backends,
            canary_job(limits),
            policy.arbiter.state_path / "parity",
            clock,
        )
        self._watching = asyncio.get_running_loop().create_task(canaries.watch())
        self._finding = asyncio.get_running_loop().create_task(pools.find())
        link = ArbiterLink(gateway, flow, backends, tally, limits, clock, plan, pools.follow)
        self._talking = asyncio.get_running_loop().create_task(link.talk(ArbiterClient(timeout_s=2.0)))

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Serve asks for the routes after it has made the replica, so they are built around its own door."""
        return build_api(self._door)

    async def __del__(self) -> None:
        """Serve calls this when the replica stops: nothing that was written may stay in memory."""
        self._talking.cancel()
        self._watching.cancel()
        await self._jobs.aclose()
        await self._callers.aclose()
        for provider in self._providers.values():
            await provider.aclose()
        self._pools.close()
        self._ledger.close()
