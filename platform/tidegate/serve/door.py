"""What the gateway's routes do, whoever speaks HTTP: Serve's replica in production, uvicorn in a test. No Ray."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tidegate.clock import Clock
from tidegate.ids import RequestId
from tidegate.serve.admission import Admitted
from tidegate.serve.api import BODY_LIMIT_BYTES, ApiError, ImagesBody, model_answer, models_answer, parse_body
from tidegate.serve.backends import Backends
from tidegate.serve.callers import Caller, Callers
from tidegate.serve.desk import Desk, pictures_in
from tidegate.serve.flow import Answer
from tidegate.serve.job_runner import Jobs
from tidegate.serve.jobs import JobStatus
from tidegate.serve.pictures import images_answer, images_events, partial_event
from tidegate.serve.relay import Relay
from tidegate.serve.repeats import HEADER, Repeats
from tidegate.serve.work import Partial


@dataclass(slots=True)
class Door:
    desk: Desk
    backends: Backends
    clock: Clock
    callers: Callers
    jobs: Jobs
    started_at_s: float
    repeats: Repeats = field(default_factory=Repeats)

    async def generate(self, request: Request) -> Response:
        """`POST /v1/images/generations`. What has no key, or is too big to be read, never becomes a request."""
        caller = self._caller(request)
        raw = await read(request)
        key = request.headers.get(HEADER)
        if key is None and b"partial_images" in raw:  # else no relay, which costs a task
            relay = Relay()
            return await relay.response(self._answered(raw, caller, relay))
        if key is None:
            return await self._answered(raw, caller)
        return await self.repeats.once(caller.name, key, raw, self.clock.now_s, partial(self._answered, raw, caller))

    def _caller(self, request: Request) -> Caller:
        return self.callers.identify(request.headers.get("authorization"))

    async def _answered(self, raw: bytes, caller: Caller, relay: Relay | None = None) -> Response:
        """`relay` gets unfinished pictures, where the client wants any. One with an Idempotency-Key has none:
        its answer is kept for repeats, which get all of it."""
        request_id = RequestId(f"{random.getrandbits(128):032x}")
        accepted_at_s = self.clock.now_s()
        try:
            with self.desk.booked(request_id, accepted_at_s) as entry:
                async with self.callers.enter(caller, request_id, accepted_at_s):
                    body = parse_body(raw, ImagesBody)
                    waiting = self.desk.flow.dispatcher.waiting
                    admitted = self.desk.admitted(body, request_id, caller, waiting, random.randrange(2**31))
                    show = None if relay is None else partial(self._shown, relay, request_id, admitted)
                    answer = entry.answer = await self.desk.flow.answer(admitted.job, accepted_at_s, show=show)
                    response = await self._handed_over(answer, admitted)
        except ApiError as error:
            response = refusal(error)
        # Not `x-request-id`: Serve sets that itself, to whatever the client sent, which may repeat.
        response.headers["x-tidegate-request-id"] = request_id
        return response

    async def submit_job(self, request: Request) -> Response:
        caller = self._caller(request)
        job = await self.jobs.submit(await read(request), caller, request.headers.get(HEADER))
        return JSONResponse(job, 202, headers={"location": f"/v1/images/jobs/{job['id']}"})

    async def list_jobs(self, request: Request) -> dict[str, Any]:
        """Query: `limit` (1 to 100, 20), `after` (a job's id), `status`."""
        caller, query = self._caller(request), request.query_params
        limit = query.get("limit", "20")
        if not limit.isdecimal() or not limit.isascii() or not 1 <= int(limit[:9]) <= 100:
            raise ApiError(400, f"'limit': must be 1 to 100, got '{limit[:20]}'", param="limit", code="invalid_value")
        status = query.get("status")
        if status is not None and status not in tuple(JobStatus):
            why = f"'status': must be one of {', '.join(JobStatus)}; got '{status[:20]}'"
            raise ApiError(400, why, param="status", code="invalid_value")
        return await self.jobs.listed(
            caller, after=query.get("after"), limit=int(limit), status=None if status is None else JobStatus(status)
        )

    async def job(self, request: Request, job: str) -> dict[str, Any]:
        return await self.jobs.fetch(job, self._caller(request))

    async def cancel_job(self, request: Request, job: str) -> dict[str, Any]:
        return await self.jobs.cancel(job, self._caller(request))

    def models(self, request: Request) -> dict[str, Any]:
        self._caller(request)
        return models_answer([self.desk.limits.model], self.started_at_s)

    def model(self, request: Request, name: str) -> dict[str, Any]:
        self._caller(request)
        if name != self.desk.limits.model:
            raise ApiError(404, f"the model '{name[:100]}' does not exist", param="model", code="model_not_found")
        return model_answer(name, self.started_at_s)

    def ready(self) -> dict[str, Any]:
        """Somebody could answer a request now."""
        if not self.backends.way_exists(self.clock.now_s()):
            raise ApiError(503, "no replica runs and no provider answers", code="no_capacity", retry_after_s=1.0)
        return {"status": "ready"}

    async def _shown(self, relay: Relay, request: RequestId, admitted: Admitted, part: Partial) -> None:
        event = partial(partial_event, part, admitted.job, admitted.reply, self.clock.now_s())
        relay.put(await asyncio.to_thread(event), {"x-tidegate-request-id": request})

    async def _handed_over(self, answer: Answer, admitted: Admitted) -> Response:
        reply, size = admitted.reply, admitted.job.size
        pictures = await pictures_in(reply, answer)
        created_s = self.clock.now_s()
        headers = {
            "x-tidegate-backend": answer.backend,
            "x-tidegate-queued-s": f"{answer.queued_s:.3f}",
            "x-tidegate-computed-s": f"{answer.computed_s:.3f}",
        }
        if answer.made.seed is not None:
            headers["x-tidegate-seed"] = str(answer.made.seed)
        if reply.stream:
            # Before the first picture nothing is sent, so a failure still has its own status (C167).
            events = images_events(answer, pictures, size, reply, created_s)
            return Response(events, media_type="text/event-stream", headers=headers)
        return JSONResponse(images_answer(answer.made, pictures, size, reply, created_s), headers=headers)


async def read(request: Request) -> bytes:
    """The body, not read further than its limit.

    Raises:
        ApiError: 413.
    """
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > BODY_LIMIT_BYTES:
            raise ApiError(413, f"the body is too big: at most {BODY_LIMIT_BYTES} bytes are read")
    return bytes(raw)


def refusal(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body(), status_code=error.status, headers=error.headers())
