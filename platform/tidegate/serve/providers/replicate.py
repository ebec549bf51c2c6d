"""A provider with Replicate's predictions (Replicate HTTP API): create, get until it ended, cancel.

A model is named `owner/name`, or by the 64 hex digits of a version. `Prefer: wait` is not used: it would keep the
prediction's id from us while it is made, and what has no id can't be cancelled.
"""

from __future__ import annotations

import math
import re
from typing import Any

from tidegate.ids import ProviderName
from tidegate.serve.providers.base import ProviderAmbiguousError, ProviderRefusedError
from tidegate.serve.providers.fields import body_of
from tidegate.serve.providers.queued import Queued, Ticket
from tidegate.serve.providers.wire import Wire, json_of
from tidegate.serve.work import ImageJob, Made
from tidegate.spec.providers import ProviderSpec

_VERSION = re.compile(r"(?:.*:)?([0-9a-f]{64})")
_CANCEL_AFTER_MIN_S = 5
"""Replicate's own least for `Cancel-After`."""


class ReplicateProvider:
    def __init__(self, spec: ProviderSpec) -> None:
        self.name = ProviderName(spec.name)
        self._wire = Wire(spec)
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
        body: dict[str, Any] = {"input": body_of(job, self._spec)}
        version = _VERSION.fullmatch(model)
        if version is not None:
            body["version"] = version[1]
        # A gateway that dies leaves nothing behind that runs for long.
        cancel_after_s = max(_CANCEL_AFTER_MIN_S, math.ceil(timeout_s))
        response = await self._wire.send(
            "POST",
            "predictions" if version is not None else f"models/{model}/predictions",
            timeout_s=timeout_s,
            body=body,
            headers={"idempotency-key": str(job.request), "cancel-after": f"{cancel_after_s}s"},
        )
        if response.status_code not in (200, 201, 202):
            raise self._wire.refusal(response, now_s)
        try:
            taken = response.json()
            return Ticket(taken["id"], taken["urls"]["get"], taken["urls"]["cancel"])
        except (ValueError, KeyError, TypeError):
            raise ProviderAmbiguousError(self._wire.name, "taken, but the answer names no prediction") from None

    async def look(self, ticket: Ticket, now_s: float) -> tuple[str, ...] | None:
        response = await self._wire.look(ticket.look_url)
        if response is None:
            return None
        if response.status_code != 200:
            raise ProviderAmbiguousError(self._wire.name, f"its prediction: status {response.status_code}")
        found = json_of(response)
        status, output = found.get("status"), found.get("output")
        if status == "succeeded":
            listed = output if isinstance(output, list) else [output]
            return tuple(str(url) for url in listed if url)
        if status in ("failed", "aborted"):
            raise ProviderRefusedError(self._wire.name, f"{status} there: {found.get('error') or 'no reason given'}")
        if status == "canceled":
            raise ProviderAmbiguousError(self._wire.name, "canceled there, after it had begun")
        return None

    async def cancel(self, ticket: Ticket) -> bool:
        answer = await self._wire.send("POST", ticket.cancel_url, timeout_s=self._spec.timeout_s)
        found = json_of(answer)
        if found.get("status") == "aborted":
            return True
        return found.get("status") == "canceled" and found.get("started_at") is None
