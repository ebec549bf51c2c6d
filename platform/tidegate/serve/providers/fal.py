"""A provider with fal's queue (fal docs, Queue API): `POST /{model}`, then the URLs that its answer names.

A status of 202 means not yet; a completed request may still have failed, which its result's own status tells.
"""

from __future__ import annotations

from tidegate.ids import ProviderName
from tidegate.serve.providers.base import ProviderAmbiguousError, ProviderRefusedError
from tidegate.serve.providers.fields import body_of
from tidegate.serve.providers.queued import Queued, Ticket
from tidegate.serve.providers.wire import Wire, json_of
from tidegate.serve.work import ImageJob, Made
from tidegate.spec.providers import ProviderSpec


class FalProvider:
    def __init__(self, spec: ProviderSpec) -> None:
        self.name = ProviderName(spec.name)
        self._wire = Wire(spec, scheme="Key")
        self._queued = Queued(self._wire, _Face(spec, self._wire))

    async def make(self, job: ImageJob, *, timeout_s: float, now_s: float) -> Made:
        return await self._queued.make(job, timeout_s=timeout_s, now_s=now_s)

    async def aclose(self) -> None:
        await self._queued.aclose()


class _Face:
    def __init__(self, spec: ProviderSpec, wire: Wire) -> None:
        self._spec, self._wire = spec, wire

    async def submit(self, job: ImageJob, *, timeout_s: float, now_s: float) -> Ticket:
        model = self._spec.models.get(job.model)
        if model is None:
            raise ProviderRefusedError(self._wire.name, f"does not offer model {job.model!r}", this_request_only=True)
        headers = {"idempotency-key": str(job.request)}
        if timeout_s > 1:
            # Not begun by then, fal drops it by itself: a gateway that dies leaves nothing behind that is paid for.
            headers["x-fal-request-start-timeout"] = f"{timeout_s:.1f}"
        response = await self._wire.send(
            "POST", model, timeout_s=timeout_s, body=body_of(job, self._spec), headers=headers
        )
        if response.status_code != 200:
            raise self._wire.refusal(response, now_s)
        try:
            taken = response.json()
            return Ticket(taken["request_id"], taken["status_url"], taken["cancel_url"], taken["response_url"])
        except (ValueError, KeyError, TypeError):
            raise ProviderAmbiguousError(self._wire.name, "taken, but the answer names no request") from None

    async def look(self, ticket: Ticket, now_s: float) -> tuple[str, ...] | None:
        status = await self._wire.look(ticket.look_url)
        if status is None or status.status_code == 202:
            return None
        if status.status_code != 200:
            raise ProviderAmbiguousError(self._wire.name, f"its queue: status {status.status_code}")
        state = json_of(status).get("status")
        if state != "COMPLETED":
            return None
        why = json_of(status).get("error")
        # A failed request's result answers with the failure's own status, 5xx among them.
        result = await self._wire.look(ticket.result_url, errors_count=True)
        if result is None:
            return None
        if why is not None or result.status_code == 422:
            said = f"failed there: {why}" if why is not None else self._wire.refusal(result, now_s).why
            only = result.status_code == 422
            raise ProviderRefusedError(self._wire.name, said, status=result.status_code, this_request_only=only)
        if result.status_code != 200:
            raise ProviderAmbiguousError(self._wire.name, f"completed, but its result: status {result.status_code}")
        try:
            return tuple(str(image["url"]) for image in result.json()["images"])
        except (ValueError, KeyError, TypeError):
            raise ProviderAmbiguousError(self._wire.name, "completed, but the result holds no images") from None

    async def cancel(self, ticket: Ticket) -> bool:
        answer = await self._wire.send("PUT", ticket.cancel_url, timeout_s=self._spec.timeout_s)
        # OK: taken out of the queue. CANCELLATION_REQUESTED: it had begun, and the model decides how to stop.
        return answer.status_code == 200 and json_of(answer).get("status") == "OK"
