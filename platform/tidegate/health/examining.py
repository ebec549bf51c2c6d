"""The burn-in of what comes back, in a process of its own: the agent goes on looking, whatever becomes of it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable

from tidegate.arbiter.messages import Verdict
from tidegate.spec.policy import HealthSpec

Examine = Callable[[Verdict, int], Awaitable[str]]
"""Given who waits, and how many GPUs the node lists: what did not pass, empty if all did."""
_PARTS = 4
"""Products, sums and looks, each with its own deadline."""


def examination(spec: HealthSpec) -> Examine | None:
    """None where the policy wants none."""
    if not spec.burn_in.before_return:
        return None

    async def examine(verdict: Verdict, gpus: int) -> str:
        only = [verdict.gpu] if verdict.gpu is not None else None
        told = {"do": "examine", "spec": spec.model_dump_json(), "node": verdict.node, "slots": gpus, "only": only}
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tidegate.health.burn_in", stdin=pipe, stdout=pipe, stderr=pipe
        )
        limit_s = _PARTS * spec.burn_in.deadline_s
        try:
            out, error = await asyncio.wait_for(process.communicate(json.dumps(told).encode()), limit_s)
        except TimeoutError:
            process.kill()
            return f"no end within {limit_s:g} s"
        if process.returncode != 0:
            last = error.decode(errors="replace").strip().splitlines()[-3:]
            return f"exit code {process.returncode}: {' '.join(last)}"
        failed = [check for check in json.loads(out) if not check["passed"]]
        return "; ".join(f"{check['name']} of {check['subject']}: {check['text']}" for check in failed)

    return examine
