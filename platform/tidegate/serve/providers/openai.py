"""A provider that speaks OpenAI's images API: OpenAI, SGLang, vLLM-Omni, another tidegate."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from tidegate.ids import ProviderName
from tidegate.serve.providers.base import ProviderAmbiguousError, ProviderRefusedError
from tidegate.serve.providers.fields import body_of
from tidegate.serve.providers.wire import Wire, error_of
from tidegate.serve.work import ImageJob, Made
from tidegate.spec.providers import ProviderSpec


class OpenAIProvider:
    """One request, one answer. When the client leaves, the connection is closed: there is nothing else to cancel."""

    def __init__(self, spec: ProviderSpec) -> None:
        self.name = ProviderName(spec.name)
        self._spec, self._wire = spec, Wire(spec)
        self._takes_response_format = True

    async def make(self, job: ImageJob, *, timeout_s: float, now_s: float) -> Made:
        model = self._spec.models.get(job.model)
        if model is None:
            raise ProviderRefusedError(self.name, f"does not offer model {job.model!r}", this_request_only=True)
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._post({"model": model, **body_of(job, self._spec)}, job, timeout_s)
        except TimeoutError:
            raise ProviderAmbiguousError(self.name, f"no answer in {timeout_s:.1f} s") from None
        if response.status_code != 200:
            raise self._wire.refusal(response, now_s)
        return Made(pngs=self._pictures(response, job), seed=job.seed if job.seed_asked else None)

    async def aclose(self) -> None:
        await self._wire.aclose()

    async def _post(self, body: dict[str, Any], job: ImageJob, timeout_s: float) -> httpx.Response:
        # A server that knows the header makes a request once, even if a proxy on the way repeats it.
        headers = {"idempotency-key": str(job.request)}
        form = {"response_format": "b64_json"} if self._takes_response_format else {}
        response = await self._wire.send(
            "POST", "images/generations", timeout_s=timeout_s, body={**body, **form}, headers=headers
        )
        if form and _refuses_response_format(response):
            # Models that always answer in base64 refuse the field (C170). A 400 made nothing, so asking again is safe.
            self._takes_response_format = False
            return await self._post(body, job, timeout_s)
        return response

    def _pictures(self, response: httpx.Response, job: ImageJob) -> tuple[bytes, ...]:
        try:
            data = response.json()["data"]
            encoded = [item["b64_json"] for item in data]
        except (ValueError, KeyError, TypeError):
            raise ProviderAmbiguousError(self.name, "status 200, but the body holds no b64_json pictures") from None
        self._wire.checked_number(len(encoded), job.images)
        return tuple(self._wire.checked(self._wire.decoded(item), job.size) for item in encoded)


def _refuses_response_format(response: httpx.Response) -> bool:
    return response.status_code == 400 and error_of(response).get("param") == "response_format"
