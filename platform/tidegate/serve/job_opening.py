"""A gateway's jobs as the policy has them: in a file, or in the Redis that gateways share."""

from __future__ import annotations

import os
import uuid
from typing import TYPE_CHECKING

from tidegate.ids import GatewayId
from tidegate.serve.callers import Callers
from tidegate.serve.desk import Desk
from tidegate.serve.job_runner import Jobs
from tidegate.serve.job_store import JobStore
from tidegate.spec.policy import Policy

if TYPE_CHECKING:
    from tidegate.serve.redis_job_store import RedisJobStore


def open_jobs(policy: Policy, desk: Desk, callers: Callers, gateway: GatewayId) -> Jobs:
    """This gateway's jobs. The owner's name is new for each process: one that comes back is another one."""
    spec = policy.jobs
    owner = f"{gateway}/{os.getpid()}/{uuid.uuid4().hex[:8]}"
    return Jobs(spec, _store(policy, owner), desk, callers)


def _store(policy: Policy, owner: str) -> JobStore | RedisJobStore:
    redis, lease_s = policy.gateway_redis, policy.jobs.lease_s
    if redis is None:
        return JobStore(policy.jobs.store_path or policy.arbiter.state_path / "jobs.sqlite", owner, lease_s)
    from tidegate.serve.redis_job_store import RedisJobStore, connect_redis  # an extra: only where it is configured

    return RedisJobStore(connect_redis(redis, os.environ), redis.namespace, owner, lease_s)
