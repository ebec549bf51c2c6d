"""The door as a Serve deployment on CPU: it speaks OpenAI's images API and sends each request where it can be made."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponse, DeploymentResponseGenerator

from tidegate.arbiter.client import ArbiterClient
from tidegate.clock import SystemClock
from tidegate.ids import GatewayId, PoolName, ProviderName
from tidegate.serve.admission import Limits
from tidegate.serve.arbiter_link import ArbiterLink, canary_job
from tidegate.serve.backends import Backends
from tidegate.serve.callers import Callers
from tidegate.serve.canaries import Canaries
from tidegate.serve.desk import Desk
from tidegate.serve.door import Door
from tidegate.serve.flow import Flow, Showing
from tidegate.serve.job_runner import open_jobs
from tidegate.serve.ledger import Ledger
from tidegate.serve.providers import connect
from tidegate.serve.router_registry import pools_seen
from tidegate.serve.routes import build_api
from tidegate.serve.tally import Tally
from tidegate.serve.work import EngineFailedError, ImageJob, Made, Partial, PoolBusyError, PoolLostError, UnfitError
from tidegate.spec.policy import Policy


class RayPools:
    """The pools of images replicas, by Serve handle."""

    def __init__(self, handles: Mapping[PoolName, DeploymentHandle]) -> None:
        # `.options` makes the router now, so that it is known before the first request.
        self._handles = {name: handle.options(method_name="make") for name, handle in handles.items()}
        self._shown = {name: handle.options(method_name="make_shown", stream=True) for name, handle in handles.items()}

    async def make(self, pool: PoolName, job: ImageJob, timeout_s: float) -> Made:
        response = self._handles[pool].remote(job)
        async with _answering(pool, response, timeout_s):
            made: Made = await response
        return made

    async def make_shown(self, pool: PoolName, job: ImageJob, timeout_s: float, show: Showing) -> Made:
        response = self._shown[pool].remote(job)
        made: Made | None = None
        async with _answering(pool, response, timeout_s):
            async for item in response:  # to its end: then the replica's slot is known to be free
                if isinstance(item, Made):
                    made = item
                else:
                    await show(item)
        if made is None:
            raise PoolLostError("the replica's stream ended without a picture")
        return made


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


@serve.deployment(max_ongoing_requests=10_000)
@serve.ingress()
class Gateway:
    def __init__(self, policy: Policy, limits: Limits, handles: dict[PoolName, DeploymentHandle]) -> None:
        gateway = GatewayId(serve.get_replica_context().replica_id.unique_id)
        clock, tally = SystemClock(), Tally()
        callers = Callers(policy.tenants, os.environ)
        self._ledger = Ledger(policy.arbiter.state_path / "ledger", gateway)
        backends = Backends(policy.providers, pools_seen)
        self._providers = {ProviderName(spec.name): connect(spec) for spec in policy.providers}
        flow = Flow(policy.serving, backends, RayPools(handles), self._providers, self._ledger, clock)
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
        link = ArbiterLink(gateway, flow, backends, tally, limits, clock)
        self._talking = asyncio.get_running_loop().create_task(link.talk(ArbiterClient(timeout_s=2.0)))

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Serve asks for the routes after it has made the replica, so they are built around its own door."""
        return build_api(self._door)

    async def __del__(self) -> None:
        """Serve calls this when the replica stops: nothing that was written may stay in memory."""
        self._talking.cancel()
        self._watching.cancel()
        await self._jobs.aclose()
        for provider in self._providers.values():
            await provider.aclose()
        self._ledger.close()
