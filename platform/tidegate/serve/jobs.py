"""A job's life, and what its caller sees of it. Pure.

    queued -> running -> succeeded | failed | cancelled

A queued one whose caller has as many running as it may is shown as `backlogged`. A gateway that dies gives its running
jobs back to the queue, except those for which a provider may already have been paid: these fail as `answer_lost`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from tidegate.ids import RequestId


class JobStatus(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


ENDED = frozenset({JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.CANCELLED})

BACKLOGGED = "backlogged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """As it is stored."""

    id: str
    caller: str
    priority: int
    body: str
    """JSON, checked; without the names of the caller's own users."""
    model: str
    seed: int
    """For where the client named none: drawn once, so that a job that is made again is the same pictures."""
    webhook_url: str | None
    created_at_s: float
    status: JobStatus = JobStatus.QUEUED
    run: int = 0
    """How often it was started."""
    started_at_s: float | None = None
    ended_at_s: float | None = None
    answer: str | None = None
    """The images answer as JSON."""
    error: str | None = None
    """OpenAI's error object as JSON."""
    backend: str | None = None
    computed_s: float | None = None
    delivered_at_s: float | None = None
    """When its webhook was taken."""
    deliveries: int = 0
    """Of its webhook that were tried."""

    @property
    def request(self) -> RequestId:
        """Its id in the ledger and at providers, new for each start."""
        return RequestId(f"{self.id}-{self.run}")


def startable(
    queued: Sequence[tuple[str, str]], running: Mapping[str, int], running_max: Mapping[str, int | None], free: int
) -> list[str]:
    """Which to start now: in the order of `queued` (id, caller), at most `free`, and of no caller more at a time than
    its `running_max`."""
    counts = Counter(running)
    chosen: list[str] = []
    for job, caller in queued:
        if len(chosen) >= free:
            break
        most = running_max.get(caller)
        if most is None or counts[caller] < most:
            counts[caller] += 1
            chosen.append(job)
    return chosen


def shown(job: Job, *, full: bool, keep_s: float, backlogged: bool) -> dict[str, Any]:
    """The job as its caller sees it; `full` with its pictures."""
    waits = job.status is JobStatus.QUEUED and backlogged
    view: dict[str, Any] = {
        "id": job.id,
        "object": "image.job",
        "status": BACKLOGGED if waits else job.status.value,
        "model": job.model,
        "created_at": job.created_at_s,
        "started_at": job.started_at_s,
        "ended_at": job.ended_at_s,
        "expires_at": None if job.ended_at_s is None else job.ended_at_s + keep_s,
        "backend": job.backend,
        "queued_s": None if job.started_at_s is None else round(job.started_at_s - job.created_at_s, 3),
        "computed_s": job.computed_s,
        "error": None if job.error is None else json.loads(job.error),
    }
    if job.webhook_url is not None:
        view["webhook"] = {
            "url": job.webhook_url,
            "deliveries": job.deliveries,
            "delivered_at": job.delivered_at_s,
        }
    if full:
        view["answer"] = None if job.answer is None else json.loads(job.answer)
    return view
