"""Jobs of the stand-in's queue faces: taken at once, worked on later, asked after until they are done."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass, field
from enum import StrEnum

from tidegate.testing.standin_studio import Fault, Order, Studio


class JobState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(slots=True)
class Job:
    id: str
    order: Order
    fault: Fault | None
    state: JobState = JobState.QUEUED
    ever_ran: bool = False
    pngs: list[bytes] = field(default_factory=list)
    why: str = ""
    run: asyncio.Task[None] | None = None

    @property
    def ended(self) -> bool:
        return self.state in (JobState.DONE, JobState.FAILED, JobState.CANCELLED)


class Jobs:
    def __init__(self, studio: Studio) -> None:
        self._studio = studio
        self._jobs: dict[str, Job] = {}

    def take(self, order: Order, fault: Fault | None) -> Job:
        job = Job(uuid.uuid4().hex, order, fault)
        self._jobs[job.id] = job
        job.run = asyncio.get_running_loop().create_task(self._do(job))
        return job

    def refuse_later(self, order: Order, why: str) -> Job:
        """Taken, but it fails at once: how fal answers an input that its model can't read."""
        job = Job(uuid.uuid4().hex, order, None, JobState.FAILED, why=why)
        self._jobs[job.id] = job
        return job

    def find(self, job_id: str) -> Job | None:
        return self._jobs.get(job_id)

    def cancel(self, job: Job) -> None:
        if not job.ended and job.run is not None:
            job.state = JobState.CANCELLED
            self._studio.counts["cancelled"] += 1
            job.run.cancel()

    def forget(self) -> None:
        for job in self._jobs.values():
            self.cancel(job)
        self._jobs.clear()

    async def _do(self, job: Job) -> None:
        def begin() -> None:
            job.state, job.ever_ran = JobState.RUNNING, True

        job.pngs = await self._studio.work_when_free(job.order, job.fault, begin)
        job.state = JobState.FAILED if job.fault is Fault.FAIL else JobState.DONE
        job.why = "CUDA out of memory" if job.fault is Fault.FAIL else ""
