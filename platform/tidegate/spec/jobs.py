"""Asynchronous jobs: the part `jobs` of `policy.yaml`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from tidegate.spec.base import Model, Seconds

Count = Annotated[int, Field(ge=1)]


class JobsSpec(Model):
    store_file: str | None = None
    """SQLite file with jobs and their pictures; none = `jobs.sqlite` in `arbiter.state_dir`. Gateways on one machine
    share it. It must lie on a local disk: SQLite's locks don't hold on network file systems."""
    running_max: Count = 32
    """Jobs that one gateway has in hand at a time, of all callers."""
    waiting_max: Count = 10_000
    """Jobs of one caller that may wait; more are answered 429."""
    deadline_s: Seconds = 3600.0
    """From submitting a job to its end."""
    keep_s: Seconds = 86_400.0
    """How long an ended job and its pictures can be fetched."""
    lease_s: Seconds = 5.0
    """A gateway that has not renewed its hold on a job for so long has died: another one takes the job."""
    webhook_attempts_max: Annotated[int, Field(ge=1, le=30)] = 12
    """Deliveries that are tried, each after twice the time of the one before, 10 minutes at most."""
    webhook_timeout_s: Seconds = 10.0

    @property
    def store_path(self) -> Path | None:
        return None if self.store_file is None else Path(self.store_file).expanduser()
