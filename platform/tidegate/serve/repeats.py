"""The same request sent again under its Idempotency-Key is answered once and made once.

As the IETF's draft `httpapi-idempotency-key-header` has it, but for one thing: a repeat that comes while the first is
at work waits for that answer, where the draft refuses it. The work goes on when its client leaves: it will ask again.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from tidegate.serve.api import ApiError

HEADER = "idempotency-key"

KEY_CHARS_MAX = 255

KEEP_S = 600.0
"""How long an answer is kept for repeats."""

KEEP_BYTES = 64 * 2**20
"""Of answers in one gateway; then the oldest go."""


@dataclass(slots=True)
class _First:
    body: bytes
    """SHA-256 of the request's body."""
    work: asyncio.Task[Response]
    kept_at_s: float | None = None
    """None while it is at work."""
    size_bytes: int = 0


class Repeats:
    def __init__(self) -> None:
        self._firsts: OrderedDict[tuple[str, str], _First] = OrderedDict()
        self._kept_bytes = 0

    async def once(
        self,
        caller: str,
        key: str,
        raw: bytes,
        now_s: Callable[[], float],
        work: Callable[[], Coroutine[Any, Any, Response]],
    ) -> Response:
        """The answer of `work()`, which runs only if this caller's key is new.

        Raises:
            ApiError: 400 for an unusable key, 422 where it was used for another body.
        """
        if not 0 < len(key) <= KEY_CHARS_MAX:
            raise ApiError(400, f"'Idempotency-Key' must have 1 to {KEY_CHARS_MAX} characters", code="invalid_header")
        self._forget(now_s())
        digest = hashlib.sha256(raw).digest()
        first = self._firsts.get((caller, key))
        if first is None:
            first = _First(digest, asyncio.get_running_loop().create_task(work()))
            self._firsts[caller, key] = first
            first.work.add_done_callback(lambda _: self._done((caller, key), now_s()))
            return await asyncio.shield(first.work)
        if first.body != digest:
            why = "this Idempotency-Key was used for another body; take a new key"
            raise ApiError(422, why, code="idempotency_key_reused", retry=False)
        response = await asyncio.shield(first.work)
        again = Response(response.body, response.status_code)
        again.raw_headers = [*response.raw_headers, (b"x-tidegate-replayed", b"true")]
        return again

    def _done(self, key: tuple[str, str], now_s: float) -> None:
        first = self._firsts[key]
        response = None if first.work.cancelled() or first.work.exception() else first.work.result()
        if response is None or not _final(response):
            del self._firsts[key]
            return
        first.kept_at_s, first.size_bytes = now_s, len(response.body)
        self._kept_bytes += first.size_bytes
        self._firsts.move_to_end(key)
        self._forget(now_s)

    def _forget(self, now_s: float) -> None:
        for key, first in list(self._firsts.items()):
            if first.kept_at_s is None:
                continue
            if now_s - first.kept_at_s < KEEP_S and self._kept_bytes <= KEEP_BYTES:
                return
            self._kept_bytes -= first.size_bytes
            del self._firsts[key]


def _final(response: Response) -> bool:
    """Pictures; or an answer that was paid for and lost (C160): asking again must not buy it again."""
    return response.status_code < 300 or response.headers.get("x-should-retry") == "false"
