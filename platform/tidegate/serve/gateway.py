"""The door: a Serve deployment on CPU that speaks OpenAI's images API and sends each request where it can be made."""

# Serve pickles the routes by value while the class is being decorated. So (1) no `from __future__ import annotations`
# here: a pickled function can't look up an annotation that is a string, and FastAPI would take `request` for a query
# parameter; (2) what the routes call stands above the class.

import asyncio
import random
import uuid
from collections.abc import Mapping

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from tidegate.arbiter.client import ArbiterClient
from tidegate.clock import Clock, SystemClock
from tidegate.ids import GatewayId, PoolName, ProviderName, RequestId
from tidegate.serve.admission import Limits, Refused, admit
from tidegate.serve.api import BODY_LIMIT_BYTES, ApiError, images_answer, model_answer, models_answer, parse_body
from tidegate.serve.arbiter_link import ArbiterLink, canary_job
from tidegate.serve.backends import Backends
from tidegate.serve.canaries import Canaries
from tidegate.serve.flow import Answer, Flow
from tidegate.serve.ledger import Ledger, Outcome
from tidegate.serve.providers import connect
from tidegate.serve.router_registry import pools_seen
from tidegate.serve.tally import Tally
from tidegate.serve.work import EngineFailedError, ImageJob, Made, PoolBusyError, PoolLostError
from tidegate.spec.policy import Policy

api = FastAPI(title="tidegate", openapi_url=None)


@api.exception_handler(ApiError)
async def _say_why(request: Request, error: ApiError) -> JSONResponse:
    return JSONResponse(error.body(), status_code=error.status, headers=error.headers())


@api.exception_handler(HTTPException)
async def _say_no_such_route(request: Request, error: HTTPException) -> JSONResponse:
    refused = ApiError(error.status_code, f"{request.method} {request.url.path[:100]}: {error.detail}")
    return JSONResponse(refused.body(), status_code=error.status_code, headers=error.headers)


class RayPools:
    """The pools of images replicas, by Serve handle."""

    def __init__(self, handles: Mapping[PoolName, DeploymentHandle]) -> None:
        # `.options` makes the router now, so that it is known before the first request.
        self._handles = {name: handle.options(method_name="make") for name, handle in handles.items()}

    async def make(self, pool: PoolName, job: ImageJob, timeout_s: float) -> Made:
        response = self._handles[pool].remote(job)
        try:
            async with asyncio.timeout(timeout_s):
                made: Made = await response
            return made
        except (asyncio.CancelledError, TimeoutError):
            response.cancel()  # else the replica would finish a picture that nobody waits for
            raise
        except RayTaskError as error:  # the replica's own code raised
            raise EngineFailedError(str(error.cause)[:300]) from None
        except BackPressureError:
            raise PoolBusyError(pool) from None
        except (RayError, DeploymentUnavailableError) as error:
            raise PoolLostError(f"{type(error).__name__}: {error}"[:300]) from None


async def _read(request: Request) -> bytes:
    """The body, not read further than its limit."""
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > BODY_LIMIT_BYTES:
            raise ApiError(413, f"the body is too big: at most {BODY_LIMIT_BYTES} bytes are read")
    return bytes(raw)


def _outcome_of(error: ApiError) -> Outcome:
    return Outcome.FAILED if error.status in (502, 504) else Outcome.REFUSED


@serve.deployment(max_ongoing_requests=10_000)
@serve.ingress(api)
class Gateway:
    """Each request id ends exactly once in the ledger: answered, refused, cancelled or failed."""

    def __init__(self, policy: Policy, limits: Limits, handles: dict[PoolName, DeploymentHandle]) -> None:
        self._id = GatewayId(serve.get_replica_context().replica_id.unique_id)
        self._limits, self._policy = limits, policy
        self._clock: Clock = SystemClock()
        self._started_at_s = self._clock.now_s()
        self._ledger = Ledger(policy.arbiter.state_path / "ledger", self._id)
        self._backends = Backends(policy.providers, pools_seen)
        self._providers = {ProviderName(spec.name): connect(spec) for spec in policy.providers}
        self._flow = Flow(policy.serving, self._backends, RayPools(handles), self._providers, self._ledger, self._clock)
        self._tally = Tally()
        self._link = ArbiterLink(self._id, self._flow, self._backends, self._tally, limits, self._clock)
        self._canaries = Canaries(
            policy.canary,
            self._providers,
            self._flow,
            self._backends,
            canary_job(limits),
            policy.arbiter.state_path / "parity",
            self._clock,
        )
        self._watching = asyncio.get_running_loop().create_task(self._canaries.watch())
        self._talking = asyncio.get_running_loop().create_task(self._link.talk(ArbiterClient(timeout_s=2.0)))

    @api.post("/v1/images/generations")
    async def generations(self, request: Request) -> JSONResponse:
        request_id = RequestId(uuid.uuid4().hex)
        accepted_at_s = self._clock.now_s()
        self._ledger.accept(request_id, accepted_at_s)
        try:
            job = self._admitted(await _read(request), request_id)
            answer = await self._flow.answer(job, accepted_at_s)
        except ApiError as error:
            response = JSONResponse(error.body(), status_code=error.status, headers=error.headers())
            self._end(request_id, accepted_at_s, _outcome_of(error), reason=error.message)
        except (asyncio.CancelledError, ClientDisconnect):
            self._end(request_id, accepted_at_s, Outcome.CANCELLED)
            raise
        except Exception as error:
            self._end(request_id, accepted_at_s, Outcome.FAILED, reason=f"{type(error).__name__}: {error}"[:300])
            raise
        else:
            body = images_answer(answer.made, job.size, self._clock.now_s())
            response = JSONResponse(body, headers={"x-tidegate-backend": answer.backend})
            self._end(request_id, accepted_at_s, Outcome.ANSWERED, answer=answer)
        # Not `x-request-id`: Serve sets that itself, to whatever the client sent, which may repeat.
        response.headers["x-tidegate-request-id"] = request_id
        return response

    @api.get("/v1/models")
    async def models(self) -> JSONResponse:
        return JSONResponse(models_answer([self._limits.model], self._started_at_s))

    @api.get("/v1/models/{name:path}")
    async def model(self, name: str) -> JSONResponse:
        if name != self._limits.model:
            raise ApiError(404, f"the model '{name}' does not exist", param="model", code="model_not_found")
        return JSONResponse(model_answer(name, self._started_at_s))

    @api.get("/health")
    async def health(self) -> JSONResponse:
        """This process lives."""
        return JSONResponse({"status": "ok"})

    @api.get("/ready")
    async def ready(self) -> JSONResponse:
        """Somebody could answer a request now."""
        if not self._backends.way_exists(self._clock.now_s()):
            raise ApiError(503, "no replica runs and no provider answers", code="no_capacity", retry_after_s=1.0)
        return JSONResponse({"status": "ready"})

    def _admitted(self, raw: bytes, request_id: RequestId) -> ImageJob:
        admitted = admit(
            parse_body(raw),
            self._limits,
            request=request_id,
            waiting=self._flow.dispatcher.waiting,
            drawn_seed=random.randrange(2**31),
        )
        if isinstance(admitted, Refused):
            raise ApiError(
                admitted.status,
                admitted.message,
                param=admitted.param,
                code=admitted.code,
                retry_after_s=admitted.retry_after_s,
            )
        return admitted

    def _end(
        self,
        request_id: RequestId,
        accepted_at_s: float,
        outcome: Outcome,
        *,
        answer: Answer | None = None,
        reason: str | None = None,
    ) -> None:
        now_s = self._clock.now_s()
        backend = None if answer is None else answer.backend
        images = 0 if answer is None else len(answer.made.pngs)
        self._ledger.end(request_id, now_s, outcome, backend=backend, reason=reason, images=images)
        self._tally.count(outcome, backend, now_s - accepted_at_s)

    async def __del__(self) -> None:
        """Serve calls this when the replica stops: nothing that was written may stay in memory."""
        self._talking.cancel()
        self._watching.cancel()
        for provider in self._providers.values():
            await provider.aclose()
        self._ledger.close()
