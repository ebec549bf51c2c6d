"""What can be read from one look at the cluster (`ArbiterClient.status`), and waiting for it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from tidegate.cli.demo.stage import WaitedTooLongError

LOOK_EVERY_S = 0.5

Look = dict[str, Any]


def running(now: Look) -> int:
    """Replicas that serve."""
    return sum(pool["running"] for pool in now["pools"])


def claim_state(now: Look) -> str:
    return now["claims"][-1]["state"] if now["claims"] else ""


def gang_step(now: Look) -> int:
    return max((gang["step"] for gang in now["gangs"]), default=-1)


def wait_for(look: Callable[[], Look], condition: Callable[[Look], bool], deadline_s: float, what: str) -> Look:
    """Look at the cluster until `condition` holds; that look.

    Raises:
        WaitedTooLongError: it does not within `deadline_s`, or the run has failed.
    """
    deadline = time.monotonic() + deadline_s
    while True:
        now = look()
        if condition(now):
            return now
        ended = [gang for gang in now["gangs"] if gang["phase"] == "failed"]
        if ended or time.monotonic() > deadline:
            why = f"the run has failed: {ended[0]['reason']}" if ended else json.dumps(now["claims"])
            raise WaitedTooLongError(f"waited for this in vain: {what}; {why}; arbiter: {now['reason']}")
        time.sleep(LOOK_EVERY_S)
