"""`tidegate up`: the control plane on a running Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import ray

from tidegate.arbiter.actor import start_arbiter
from tidegate.cli.connect import connect
from tidegate.errors import TidegateError
from tidegate.health.on_ray import start_agents
from tidegate.spec.load import load_policy

START_DEADLINE_S = 60.0


class StartError(TidegateError):
    """A part of the control plane did not come up."""


def bring_up(policy_path: Path, address: str) -> Iterator[str]:
    """Start what does not run yet; yields a line for each part.

    Raises:
        PolicyError: see there. Checked before anything is started.
        StartError: a part did not answer in time.
    """
    policy = load_policy(policy_path)
    connect(address)
    try:
        arbiter = start_arbiter(policy)
        try:
            running = ray.get(arbiter.policy.remote(), timeout=START_DEADLINE_S)
        except ray.exceptions.RayError as error:
            raise StartError(f"the arbiter did not answer within {START_DEADLINE_S:.0f} s: {error}") from None
        yield "arbiter runs"
        if running != policy:
            yield f"warning: it runs with an older policy than {policy_path}; stop it first to change it"
        count = start_agents(policy)
        yield f"{count} health agents run"
    finally:
        ray.shutdown()
