"""A provider that speaks OpenAI's images API."""

from __future__ import annotations

import asyncio
import base64
import binascii
import email.utils
import io
import os
from typing import Any

import httpx
from PIL import Image, UnidentifiedImageError

from tidegate.ids import ProviderName
from tidegate.serve.providers.base import ProviderAmbiguousError, ProviderRefusedError
from tidegate.serve.work import ImageJob, Made, Size
from tidegate.spec.policy import ProviderSpec

_CONNECT_TIMEOUT_S = 3.0

_MAYBE_MADE = frozenset({408, 502, 504, 520, 522, 524})
"""A gateway in the middle gave up waiting: what stands behind it may still have made the picture."""

_ABOUT_THE_REQUEST = frozenset({400, 404, 413, 415, 422})


class OpenAIProvider:
    """One provider. Connections are kept open; nothing is ever sent twice, so all retrying is routing's (C161)."""

    def __init__(self, spec: ProviderSpec) -> None:
        self.name = ProviderName(spec.name)
        self._models = spec.models
        key = os.environ.get(spec.api_key_env, "") if spec.api_key_env else ""
        self._client = httpx.AsyncClient(
            base_url=spec.base_url.rstrip("/") + "/",
            headers={"authorization": f"Bearer {key}"} if key else {},
            limits=httpx.Limits(max_connections=spec.slots + 1, max_keepalive_connections=spec.slots + 1),
            # A proxy setting of the machine isn't meant for a base_url that the operator wrote down.
            trust_env=False,
        )
        self._takes_response_format = True

    async def make(self, job: ImageJob, *, timeout_s: float, now_s: float) -> Made:
        model = self._models.get(job.model)
        if model is None:
            raise ProviderRefusedError(self.name, f"does not offer model {job.model!r}", this_request_only=True)
        body: dict[str, Any] = {"model": model, "prompt": job.prompt, "n": job.images, "size": str(job.size)}
        if job.seed_asked:
            body["seed"] = job.seed
        if job.steps is not None:
            body["num_inference_steps"] = job.steps
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._post(body, job, timeout_s)
        except TimeoutError:
            raise ProviderAmbiguousError(self.name, f"no answer in {timeout_s:.1f} s") from None
        if response.status_code != 200:
            raise self._refusal(response, now_s)
        pngs = self._pictures(response, job)
        return Made(pngs=pngs, seed=job.seed if job.seed_asked else None)

    async def aclose(self) -> None:
        await self._client.aclose()

    async def _post(self, body: dict[str, Any], job: ImageJob, timeout_s: float) -> httpx.Response:
        timeout = httpx.Timeout(timeout_s, connect=min(_CONNECT_TIMEOUT_S, timeout_s))
        # A server that knows the header makes a request once, even if a proxy on the way repeats it.
        headers = {"idempotency-key": str(job.request)}
        if self._takes_response_format:
            body = {**body, "response_format": "b64_json"}
        try:
            response = await self._client.post("images/generations", json=body, headers=headers, timeout=timeout)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.InvalidURL) as error:
            raise ProviderRefusedError(self.name, f"not reached: {type(error).__name__} {error}".strip()) from None
        except httpx.TimeoutException:
            raise ProviderAmbiguousError(self.name, f"no answer in {timeout_s:.1f} s") from None
        except httpx.HTTPError as error:
            raise ProviderAmbiguousError(self.name, f"answer lost: {type(error).__name__} {error}".strip()) from None
        if self._takes_response_format and _refuses_response_format(response):
            # Models that always answer in base64 refuse the field (C170). A 400 made nothing, so asking again is safe.
            self._takes_response_format = False
            del body["response_format"]
            return await self._post(body, job, timeout_s)
        return response

    def _refusal(self, response: httpx.Response, now_s: float) -> ProviderRefusedError | ProviderAmbiguousError:
        status = response.status_code
        why = f"status {status}: {_error(response).get('message') or response.text[:200]}"
        if status in _MAYBE_MADE:
            return ProviderAmbiguousError(self.name, why)
        return ProviderRefusedError(
            self.name,
            why,
            status=status,
            retry_after_s=retry_after_s(response.headers.get("retry-after"), now_s),
            this_request_only=status in _ABOUT_THE_REQUEST,
        )

    def _pictures(self, response: httpx.Response, job: ImageJob) -> tuple[bytes, ...]:
        try:
            data = response.json()["data"]
            encoded = [item["b64_json"] for item in data]
        except (ValueError, KeyError, TypeError):
            raise ProviderAmbiguousError(self.name, "status 200, but the body holds no b64_json pictures") from None
        if not encoded:
            # The reply is whole and says that it holds nothing: a failure in a success's clothes (C158).
            raise ProviderRefusedError(self.name, "status 200 with no pictures in it")
        if len(encoded) != job.images:
            raise ProviderAmbiguousError(self.name, f"{len(encoded)} pictures instead of {job.images}")
        return tuple(self._checked(item, job.size) for item in encoded)

    def _checked(self, encoded: object, size: Size) -> bytes:
        try:
            png = base64.b64decode(str(encoded), validate=True)
            with Image.open(io.BytesIO(png), formats=("PNG",)) as image:
                image.verify()
                got = Size(*image.size)
        except (binascii.Error, UnidentifiedImageError, OSError, SyntaxError, Image.DecompressionBombError) as error:
            raise ProviderAmbiguousError(self.name, f"a picture that is no PNG: {error}") from None
        if got != size:
            raise ProviderAmbiguousError(self.name, f"a picture of {got} instead of {size}")
        return png


def retry_after_s(header: str | None, now_s: float) -> float | None:
    """`Retry-After` in seconds from now, from either form (RFC 9110, 10.2.3) or with a fraction; None if unreadable."""
    if not header:
        return None
    try:
        seconds = float(header)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(header).timestamp() - now_s
        except ValueError:
            return None
    return max(0.0, seconds) if seconds == seconds else None


def _error(response: httpx.Response) -> dict[str, Any]:
    """OpenAI's error object, empty where the body is something else."""
    try:
        error = response.json().get("error")
    except (ValueError, AttributeError):
        return {}
    return error if isinstance(error, dict) else {}


def _refuses_response_format(response: httpx.Response) -> bool:
    return response.status_code == 400 and _error(response).get("param") == "response_format"
