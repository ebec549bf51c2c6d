"""HTTP as all adapters speak it: which failure proves that nothing was made, and what counts as a picture."""

from __future__ import annotations

import base64
import binascii
import email.utils
import io
import os
from typing import Any

import httpx
from PIL import Image, UnidentifiedImageError

from tidegate.ids import ProviderName
from tidegate.serve.providers.base import ProviderAmbiguousError, ProviderRefusedError, WrongPictureError
from tidegate.serve.work import Size
from tidegate.spec.providers import ProviderSpec

_CONNECT_TIMEOUT_S = 3.0

_PICTURE_LIMIT_BYTES = 64 * 2**20

_MAYBE_MADE = frozenset({408, 502, 504, 520, 522, 524})
"""A gateway in the middle gave up waiting: what stands behind it may still have made the picture."""

_ABOUT_THE_REQUEST = frozenset({400, 404, 413, 415, 422})


class Wire:
    """One provider's connections. They are kept open; nothing is sent twice by itself, so all retrying is routing's
    (C161). The key goes to the provider's own host only, whatever URLs its answers name."""

    def __init__(self, spec: ProviderSpec, scheme: str = "Bearer") -> None:
        self.name = ProviderName(spec.name)
        key = os.environ.get(spec.api_key_env, "") if spec.api_key_env else ""
        self._own = httpx.URL(spec.base_url.rstrip("/") + "/")
        self._auth = {"authorization": f"{scheme} {key}"} if key else {}
        self._client = httpx.AsyncClient(
            base_url=self._own,
            limits=httpx.Limits(max_connections=spec.slots * 2, max_keepalive_connections=spec.slots + 1),
            # A proxy setting of the machine isn't meant for a base_url that the operator wrote down.
            trust_env=False,
        )

    async def send(
        self,
        method: str,
        url: str,
        *,
        timeout_s: float,
        body: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
    ) -> httpx.Response:
        """One request that may make something.

        Raises:
            ProviderRefusedError: it was never reached.
            ProviderAmbiguousError: it was, and no whole answer came back.
        """
        self._must_be_followed(url)
        timeout = httpx.Timeout(timeout_s, connect=min(_CONNECT_TIMEOUT_S, timeout_s))
        sent = {**self.key_for(url), **(headers or {})}
        try:
            return await self._client.request(method, url, json=body, headers=sent, timeout=timeout)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.InvalidURL) as error:
            raise ProviderRefusedError(self.name, f"not reached: {type(error).__name__} {error}".strip()) from None
        except httpx.TimeoutException:
            raise ProviderAmbiguousError(self.name, f"no answer in {timeout_s:.1f} s") from None
        except httpx.HTTPError as error:
            raise ProviderAmbiguousError(self.name, f"answer lost: {type(error).__name__} {error}".strip()) from None

    async def look(self, url: str, *, errors_count: bool = False) -> httpx.Response | None:
        """One GET, which changes nothing; None where it may be asked again (lost, throttled, a server's error unless
        `errors_count`)."""
        self._must_be_followed(url)
        try:
            response = await self._client.get(url, headers=self.key_for(url), timeout=_CONNECT_TIMEOUT_S * 3)
        except httpx.HTTPError:
            return None
        again = response.status_code == 429 or (response.status_code >= 500 and not errors_count)
        return None if again else response

    async def picture(self, url: str) -> bytes | None:
        """The file behind a URL that the provider named; None where it may be asked again.

        Raises:
            ProviderAmbiguousError: it can't be had: no such file, too big, or a URL that isn't followed.
        """
        if url.startswith("data:"):
            return self.decoded(url.partition(";base64,")[2])
        self._must_be_followed(url)
        raw = bytearray()
        try:
            async with self._client.stream("GET", url, headers=self.key_for(url)) as response:
                if response.status_code == 429 or response.status_code >= 500:
                    return None
                if response.status_code != 200:
                    raise ProviderAmbiguousError(self.name, f"its picture: status {response.status_code}")
                async for chunk in response.aiter_bytes():
                    raw += chunk
                    if len(raw) > _PICTURE_LIMIT_BYTES:
                        raise ProviderAmbiguousError(self.name, f"its picture: over {_PICTURE_LIMIT_BYTES} bytes")
        except httpx.HTTPError:
            return None
        return bytes(raw)

    def refusal(self, response: httpx.Response, now_s: float) -> ProviderRefusedError | ProviderAmbiguousError:
        """What an answer without pictures means, by its status class."""
        status = response.status_code
        why = f"status {status}: {_message(response) or response.text[:200]}"
        if status in _MAYBE_MADE:
            return ProviderAmbiguousError(self.name, why)
        wait = response.headers.get("retry-after")
        if wait is None and status == 429:
            wait = response.headers.get("ratelimit-reset")  # Replicate's word for it
        return ProviderRefusedError(
            self.name,
            why,
            status=status,
            retry_after_s=retry_after_s(wait, now_s),
            this_request_only=status in _ABOUT_THE_REQUEST,
        )

    def decoded(self, encoded: object) -> bytes:
        try:
            return base64.b64decode(str(encoded), validate=True)
        except binascii.Error as error:
            raise WrongPictureError(self.name, f"a picture that is no base64: {error}") from None

    def checked(self, png: bytes, size: Size) -> bytes:
        """The same bytes, if they are a whole PNG of that size."""
        try:
            with Image.open(io.BytesIO(png), formats=("PNG",)) as image:
                image.verify()
                got = Size(*image.size)
        except (UnidentifiedImageError, OSError, SyntaxError, Image.DecompressionBombError) as error:
            raise WrongPictureError(self.name, f"a picture that is no PNG: {error}") from None
        if got != size:
            raise WrongPictureError(self.name, f"a picture of {got} instead of {size}")
        return png

    def checked_number(self, got: int, asked: int) -> None:
        if got == 0:
            # The reply is whole and says that it holds nothing: a failure in a success's clothes (C158).
            raise ProviderRefusedError(self.name, "a success with no pictures in it")
        if got != asked:
            raise ProviderAmbiguousError(self.name, f"{got} pictures instead of {asked}")

    def key_for(self, url: str) -> dict[str, str]:
        """The headers that show our key: none for a foreign host."""
        return self._auth if self._is_own(url) else {}

    async def aclose(self) -> None:
        await self._client.aclose()

    def _is_own(self, url: str) -> bool:
        there = self._own.join(url)
        return (there.scheme, there.host, there.port) == (self._own.scheme, self._own.host, self._own.port)

    def _must_be_followed(self, url: str) -> None:
        # An answer may not send us to the inside of our own network in the clear.
        if not self._is_own(url) and self._own.join(url).scheme != "https":
            raise ProviderAmbiguousError(self.name, f"it names {url[:80]!r}: only https and its own host are followed")


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


def json_of(response: httpx.Response) -> dict[str, Any]:
    """The answer's JSON object, empty where the body is something else."""
    try:
        body = response.json()
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


def error_of(response: httpx.Response) -> dict[str, Any]:
    """OpenAI's error object, empty where the body is something else."""
    error = json_of(response).get("error")
    return error if isinstance(error, dict) else {}


def _message(response: httpx.Response) -> str:
    """The sentence in an error's body: OpenAI's, or `detail` as FastAPI, fal and Replicate write it."""
    return str(error_of(response).get("message") or json_of(response).get("detail") or "")[:200]
