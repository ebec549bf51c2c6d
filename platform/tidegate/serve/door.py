"""What the gateway's routes do, whoever speaks HTTP: Serve's replica in production, uvicorn in a test. No Ray."""

from __future__ import annotations

import asyncio
import random
import uuid
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tidegate.clock import Clock
from tidegate.ids import RequestId
from tidegate.serve.admission import Admitted, Limits, Refused, Reply, admit
from tidegate.serve.api import BODY_LIMIT_BYTES, ApiError, ImagesBody, model_answer, models_answer, parse_body
from tidegate.serve.backends import Backends
from tidegate.serve.callers import Caller, Callers
from tidegate.serve.flow import Answer, Flow
from tidegate.serve.ledger import Ledger, Outcome
from tidegate.serve.pictures import encoded, images_answer, images_events
from tidegate.serve.repeats import HEADER, Repeats


class Counts(Protocol):
    def count(self, outcome: Outcome, backend: str | None, took_s: float) -> None: ...


@dataclass(slots=True)
class Door:
    """Each request id ends exactly once in the ledger: answered, refused, cancelled or failed."""

    limits: Limits
    flow: Flow
    backends: Backends
    ledger: Ledger
    counts: Counts
    clock: Clock
    callers: Callers
    started_at_s: float
    repeats: Repeats = field(default_factory=Repeats)

    async def generate(self, request: Request) -> Response:
        """`POST /v1/images/generations`. What has no key, or is too big to be read, never becomes a request."""
        caller = self.callers.identify(request.headers.get("authorization"))
        raw = await read(request)
        key = request.headers.get(HEADER)
        if key is None:
            return await self._answered(raw, caller)
        return await self.repeats.once(caller.name, key, raw, self.clock.now_s, partial(self._answered, raw, caller))

    async def _answered(self, raw: bytes, caller: Caller) -> Response:
        request_id = RequestId(uuid.uuid4().hex)
        accepted_at_s = self.clock.now_s()
        self.ledger.accept(request_id, accepted_at_s)
        try:
            with caller.enter(accepted_at_s):
                admitted = self._admitted(parse_body(raw, ImagesBody), request_id, caller)
                answer = await self.flow.answer(admitted.job, accepted_at_s)
                response = await self._handed_over(answer, admitted)
        except ApiError as error:
            response = refusal(error)
            self._end(request_id, accepted_at_s, _outcome_of(error), reason=error.message)
        except asyncio.CancelledError:
            self._end(request_id, accepted_at_s, Outcome.CANCELLED)
            raise
        except Exception as error:
            self._end(request_id, accepted_at_s, Outcome.FAILED, reason=f"{type(error).__name__}: {error}"[:300])
            raise
        else:
            self._end(request_id, accepted_at_s, Outcome.ANSWERED, answer=answer)
        # Not `x-request-id`: Serve sets that itself, to whatever the client sent, which may repeat.
        response.headers["x-tidegate-request-id"] = request_id
        return response

    def models(self, request: Request) -> dict[str, Any]:
        self.callers.identify(request.headers.get("authorization"))
        return models_answer([self.limits.model], self.started_at_s)

    def model(self, request: Request, name: str) -> dict[str, Any]:
        self.callers.identify(request.headers.get("authorization"))
        if name != self.limits.model:
            raise ApiError(404, f"the model '{name[:100]}' does not exist", param="model", code="model_not_found")
        return model_answer(name, self.started_at_s)

    def ready(self) -> dict[str, Any]:
        """Somebody could answer a request now."""
        if not self.backends.way_exists(self.clock.now_s()):
            raise ApiError(503, "no replica runs and no provider answers", code="no_capacity", retry_after_s=1.0)
        return {"status": "ready"}

    def _admitted(self, body: ImagesBody, request_id: RequestId, caller: Caller) -> Admitted:
        admitted = admit(
            body,
            self.limits,
            request=request_id,
            waiting=self.flow.dispatcher.waiting,
            drawn_seed=random.randrange(2**31),
            keep_local=caller.local_only,
            priority=caller.priority,
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
            # Nothing is sent before the pictures are there, so a failure still has its own status (C166, C167).
            events = images_events(answer.made, pictures, size, reply, created_s)
            return Response(events, media_type="text/event-stream", headers=headers)
        return JSONResponse(images_answer(answer.made, pictures, size, reply, created_s), headers=headers)

    def _end(
        self,
        request_id: RequestId,
        accepted_at_s: float,
        outcome: Outcome,
        *,
        answer: Answer | None = None,
        reason: str | None = None,
    ) -> None:
        now_s = self.clock.now_s()
        backend = None if answer is None else answer.backend
        images = 0 if answer is None else len(answer.made.pngs)
        self.ledger.end(request_id, now_s, outcome, backend=backend, reason=reason, images=images)
        self.counts.count(outcome, backend, now_s - accepted_at_s)


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


async def pictures_in(reply: Reply, answer: Answer) -> tuple[bytes, ...]:
    """The answer's pictures in the asked format; PNG needs no work and no thread."""
    if reply.format == "png":
        return answer.made.pngs
    return await asyncio.to_thread(encoded, answer.made.pngs, reply)


def refusal(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body(), status_code=error.status, headers=error.headers())


def _outcome_of(error: ApiError) -> Outcome:
    return Outcome.FAILED if error.status in (502, 504) else Outcome.REFUSED
