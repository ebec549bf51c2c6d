"""One request from its body to its pictures, with its row in the ledger: the part that requests and jobs share."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from tidegate.clock import Clock
from tidegate.ids import RequestId
from tidegate.serve.admission import Admitted, Limits, Refused, Reply, admit
from tidegate.serve.api import ApiError, ImagesBody
from tidegate.serve.callers import Caller
from tidegate.serve.flow import REPLICAS_LEFT, Answer, Flow
from tidegate.serve.ledger import Ledger, Outcome
from tidegate.serve.pictures import encoded


class Counts(Protocol):
    def count(self, outcome: Outcome, backend: str | None, took_s: float) -> None: ...


@dataclass(slots=True)
class Entry:
    """An open row of the ledger."""

    answer: Answer | None = None
    """To be set before the row is closed, where there is one."""


@dataclass(slots=True)
class Desk:
    limits: Limits
    flow: Flow
    ledger: Ledger
    counts: Counts
    clock: Clock

    @contextmanager
    def booked(self, request: RequestId, accepted_at_s: float) -> Iterator[Entry]:
        """Open a row and close it exactly once, by how the block ends: answered, refused, cancelled or failed."""
        self.ledger.accept(request, accepted_at_s)
        entry = Entry()
        try:
            yield entry
        except ApiError as error:
            self._end(request, accepted_at_s, _outcome_of(error), reason=error.message)
            raise
        except asyncio.CancelledError:
            self._end(request, accepted_at_s, Outcome.CANCELLED)
            raise
        except Exception as error:
            self._end(request, accepted_at_s, Outcome.FAILED, reason=f"{type(error).__name__}: {error}"[:300])
            raise
        else:
            self._end(request, accepted_at_s, Outcome.ANSWERED, answer=entry.answer)

    def admitted(self, body: ImagesBody, request: RequestId, caller: Caller, waiting: int, drawn_seed: int) -> Admitted:
        """As `admission.admit`.

        Raises:
            ApiError: it is refused.
        """
        admitted = admit(
            body,
            self.limits,
            request=request,
            waiting=waiting,
            drawn_seed=drawn_seed,
            keep_local=caller.local_only,
            hedge=caller.hedge,
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

    def _end(
        self,
        request: RequestId,
        accepted_at_s: float,
        outcome: Outcome,
        *,
        answer: Answer | None = None,
        reason: str | None = None,
    ) -> None:
        now_s = self.clock.now_s()
        backend = None if answer is None else answer.backend
        images = 0 if answer is None else len(answer.made.pngs)
        self.ledger.end(request, now_s, outcome, backend=backend, reason=reason, images=images)
        self.counts.count(outcome, backend, now_s - accepted_at_s)


async def pictures_in(reply: Reply, answer: Answer) -> tuple[bytes, ...]:
    """The answer's pictures in the asked format; PNG needs no work and no thread."""
    if reply.format == "png":
        return answer.made.pngs
    return await asyncio.to_thread(encoded, answer.made.pngs, reply)


def _outcome_of(error: ApiError) -> Outcome:
    tried = error.status in (502, 504) or error.code == REPLICAS_LEFT
    return Outcome.FAILED if tried else Outcome.REFUSED
