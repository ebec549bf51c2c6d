"""A job's end, told to its caller: signed as Standard Webhooks has it, which the `openai` client can verify.

Source: standard-webhooks, spec/standard-webhooks.md. The event's id is the same in every delivery, so that a receiver
can tell a repeat.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
from urllib.parse import urlsplit

import httpx

from tidegate.errors import PolicyError
from tidegate.serve.jobs import Job

DELAY_MAX_S = 600.0

_PREFIX = "whsec_"


def delay_s(tried: int, draw: float) -> float:
    """Until the next delivery after `tried` ones: 1, 2, 4 … 600 s, by a random `draw` in [0, 1) up to half as long
    again, so that a receiver that comes back is not met by all at once."""
    return min(DELAY_MAX_S, 2.0 ** max(0, tried - 1)) * (1 + draw / 2)


def event(job: Job) -> bytes:
    """The body; pictures are fetched, not sent."""
    assert job.ended_at_s is not None
    data = {"id": job.id, "status": job.status.value, "model": job.model}
    about = {
        "id": event_id(job),
        "object": "event",
        "type": f"image.job.{job.status}",
        "created_at": int(job.ended_at_s),
    }
    return json.dumps({**about, "data": data}).encode()


def event_id(job: Job) -> str:
    return f"evt-{job.id}"


def signed(secret: bytes, identity: str, at_s: float, body: bytes) -> dict[str, str]:
    """The headers of one delivery."""
    stamp = str(int(at_s))
    digest = hmac.new(secret, f"{identity}.{stamp}.".encode() + body, hashlib.sha256).digest()
    return {
        "content-type": "application/json",
        "webhook-id": identity,
        "webhook-timestamp": stamp,
        "webhook-signature": "v1," + base64.b64encode(digest).decode("ascii"),
    }


def secret_bytes(where: str, secret: str) -> bytes:
    """The key that signs, of a `whsec_…` secret or of any other text.

    Raises:
        PolicyError: what follows `whsec_` is no base64.
    """
    if not secret.startswith(_PREFIX):
        return secret.encode()
    try:
        return base64.b64decode(secret.removeprefix(_PREFIX), validate=True)
    except binascii.Error:
        raise PolicyError((f"{where}: what follows {_PREFIX} is no base64",)) from None


def origin_of(url: str) -> str | None:
    """`https://host:port` of an address to which a webhook could be sent; None if it is none."""
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018  raises where it is no number
    except ValueError:
        return None
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc or not url.isprintable():
        return None
    return f"{parts.scheme}://{parts.netloc}"


async def deliver(client: httpx.AsyncClient, url: str, headers: dict[str, str], body: bytes, timeout_s: float) -> bool:
    """Whether the receiver took it: any 2xx. A redirect is none: it would lead past the allowed origins."""
    try:
        answer = await client.post(url, content=body, headers=headers, timeout=timeout_s, follow_redirects=False)
    except (httpx.HTTPError, httpx.InvalidURL):
        return False
    return answer.is_success
