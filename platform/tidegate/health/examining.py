"""The burn-in of what comes back, in a process of its own: the agent goes on looking, whatever becomes of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

from tidegate.arbiter.messages import Verdict
from tidegate.examiner import PARTS, ask_examiner
from tidegate.spec.policy import HealthSpec

Examine = Callable[[Verdict, int], Awaitable[str]]
"""Given who waits, and how many GPUs the node lists: what did not pass, empty if all did."""


def examination(spec: HealthSpec) -> Examine | None:
    """None where the policy wants none."""
    if not spec.burn_in.before_return:
        return None

    async def examine(verdict: Verdict, gpus: int) -> str:
        only = [verdict.gpu] if verdict.gpu is not None else None
        told = {"do": "examine", "spec": spec.model_dump_json(), "node": verdict.node, "slots": gpus, "only": only}
        limit_s = PARTS * spec.burn_in.deadline_s
        answer = await asyncio.to_thread(ask_examiner, json.dumps(told), limit_s)
        if answer.said is None:
            return answer.late or answer.error or "no answer"
        failed = [check for check in answer.said if not check["passed"]]
        return "; ".join(f"{check['name']} of {check['subject']}: {check['text']}" for check in failed)

    return examine
