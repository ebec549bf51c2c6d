"""The burn-in before a gang's first start on a node: all its new nodes at once, on the GPUs that its grant holds there.

What is examined, and how it is judged, is the health room's (`python -m tidegate.health.burn_in`, told and answering
by JSON): it runs in a process of its own, so that an NVML that hangs takes nothing of the gang along.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import ray
from pydantic import TypeAdapter
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tidegate.arbiter.client import BACK_WITHIN_S, ArbiterClient
from tidegate.arbiter.messages import Check, Grant, JournalEntry
from tidegate.errors import NoArbiterError, UnknownSubjectError
from tidegate.examiner import PARTS, Answer, ask_examiner
from tidegate.gang.events import Event, Evicted
from tidegate.gang.fitness import Asked, Failure, due, failures, out, passed
from tidegate.gang.shape import Gang, Note
from tidegate.ids import ClaimId, GpuId, NodeId, Tier
from tidegate.spec.policy import HealthSpec

log = logging.getLogger(__name__)

START_S = 60.0
"""For Ray to start it on a node, beside all that."""
JUDGED_WITHIN_S = 60.0
TRIES = 3
"""An examination that Ray loses, or that ends by an error of its own, says nothing about the node: after so many it is
let through."""
REGRANT_WAIT_S = 10.0
"""What failed is told to the arbiter, and its next grant is without it; the gang starts without it in any case."""
_CHECKS = TypeAdapter(dict[NodeId, list[Check]])


class BurnIn:
    """Knows for as long as the coordinator's process lives who has been examined: restarts in place cost nothing."""

    def __init__(
        self,
        claim: ClaimId,
        spec: HealthSpec,
        arbiter: ArbiterClient,
        write: Callable[[Note], None],
        happen: Callable[[Event], None],
    ) -> None:
        self._claim, self._spec, self._write, self._happen = claim, spec, write, happen
        self._arbiter = arbiter
        self._settled: set[GpuId] = set()
        """Passed, failed, or let through."""
        self._burned: dict[NodeId, Any] = {}
        """Of nodes that passed: those that come later are measured against them."""
        self._tries: dict[NodeId, int] = {}
        self._at_work: asyncio.Task[None] | None = None
        self._told: tuple[Grant, float] | None = None
        """What failed was told while that grant stood, and when."""

    def holds(self, gang: Gang) -> bool:
        """Whether the gang may not start yet; begins what is to be done for that."""
        if self._at_work is not None and not self._at_work.done():
            return True
        told = self._told
        if told is not None and told[0] is gang.grant and time.monotonic() - told[1] < REGRANT_WAIT_S:
            return True
        asked = due(gang.grant, gang.evicted, self._settled)
        if not asked:
            return False
        self._at_work = asyncio.get_running_loop().create_task(self._examine(gang.grant, asked))
        return True

    async def _examine(self, grant: Grant, asked: Asked) -> None:
        try:
            await self._round(grant, asked)
        except Exception as error:  # ours, or the examiner's: it says nothing about any GPU
            log.exception("the burn-in ended badly")
            await self._not_examined(asked, dict.fromkeys(asked, f"{type(error).__name__}: {error}"))

    async def _round(self, grant: Grant, asked: Asked) -> None:
        began_s = time.monotonic()
        count = sum(map(len, asked.values()))
        why = f"{count} GPUs on {len(asked)} nodes are examined before {self._claim} starts there"
        await self._say(asked, f"burn-in: {why}", state="began")
        limit_s = PARTS * self._spec.burn_in.deadline_s
        answers = dict(zip(asked, await asyncio.gather(*self._sent(grant, asked, limit_s)), strict=True))
        burned = {node: answer.said for node, answer in answers.items() if answer.said is not None}
        judged = await self._judge({**self._burned, **burned}) if burned else {}
        checks = {node: judged[node] for node in burned}
        for node, answer in answers.items():
            if answer.late is not None:
                checks[node] = [Check(name="burn-in", subject=node, passed=False, text=answer.late)]
        known = {node: gpus for node, gpus in asked.items() if node in checks}
        failed, took_s = failures(known, checks), time.monotonic() - began_s
        good = passed(known, checks)
        gone = out(known, failed)
        self._settled |= good | gone
        well = {node: gpus for node, gpus in known.items() if good.issuperset(gpus)}
        self._burned |= {node: burned[node] for node in well}
        if well:
            said = f"burn-in passed on {len(well)} nodes, {sum(len(checks[node]) for node in well)} checks"
            await self._say(well, f"{said} in {took_s:.1f} s", state="passed", took_s=took_s)
        if failed:
            self._told = (grant, time.monotonic())
        for failure in failed:
            await self._take_out(failure, took_s)
        errors = {node: answer.error for node, answer in answers.items() if answer.error is not None}
        if errors:
            await self._not_examined(asked, errors)

    def _sent(self, grant: Grant, asked: Asked, limit_s: float) -> Iterable[Any]:
        """One examination a node, in its bundle of the grant's placement group and with all of the bundle's GPUs."""
        try:
            group = ray.util.get_placement_group(grant.placement_group)
        except ValueError as error:  # the arbiter has removed it since
            return [_lost(str(error)) for _ in asked]
        bundles = {node.node: bundle for bundle, node in enumerate(grant.nodes)}
        task = ray.remote(examined)
        return [
            _answer(
                task.options(
                    num_cpus=0,
                    num_gpus=grant.gpus_per_node,
                    max_retries=0,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(
                        group, placement_group_bundle_index=bundles[node]
                    ),
                ).remote(self._told_to(node, gpus), limit_s),
                limit_s + START_S,
            )
            for node, gpus in asked.items()
        ]

    def _told_to(self, node: NodeId, gpus: tuple[GpuId, ...]) -> str:
        # As many GPUs as the gang has: one that is out already is no fault of the node's.
        told = {"do": "burn", "spec": self._spec.model_dump_json(), "node": node, "slots": len(gpus), "only": gpus}
        return json.dumps(told)

    async def _judge(self, burned: Mapping[NodeId, Any]) -> dict[NodeId, list[Check]]:
        told = json.dumps({"do": "judge", "burned": list(burned.values())})
        answer = await asyncio.to_thread(ask_examiner, told, JUDGED_WITHIN_S)
        if answer.said is None:
            raise RuntimeError(answer.error or answer.late)
        return _CHECKS.validate_python(answer.said)

    async def _take_out(self, failure: Failure, took_s: float) -> None:
        reason = f"burn-in before {self._claim} failed: {failure.reason}"
        data = {"node": failure.node, "gpu": failure.gpu}
        self._happen(Evicted(node=failure.node, gpu=failure.gpu, reason=reason))
        subjects = {failure.node: (failure.gpu,) if failure.gpu is not None else ()}
        await self._say(subjects, reason, state="failed", took_s=took_s, **data)
        try:
            patient = ArbiterClient(patience_s=BACK_WITHIN_S)
            await patient.quarantine(failure.subject, Tier.SERVE, reason)
        except (NoArbiterError, UnknownSubjectError) as error:
            log.warning("%s stays out of this gang only: %s", failure.subject, error)
        self._told = (self._told[0], time.monotonic()) if self._told is not None else None

    async def _not_examined(self, asked: Asked, errors: Mapping[NodeId, str]) -> None:
        for node, error in errors.items():
            self._tries[node] = self._tries.get(node, 0) + 1
            given_up = self._tries[node] >= TRIES
            if given_up:
                self._settled |= set(asked[node])
            then = "the gang starts there without one" if given_up else "it is tried again"
            said = f"burn-in could not be done, {then}: {error}"
            await self._say({node: asked[node]}, said, state="not examined")

    async def _say(self, about: Mapping[NodeId, tuple[GpuId, ...]], reason: str, **data: Any) -> None:
        """In the run's journal, and in the arbiter's."""
        self._write(Note(kind="burn_in", reason=reason, data={"nodes": list(about), **data}))
        subjects = (self._claim, *about, *(gpu for gpus in about.values() for gpu in gpus))
        entry = JournalEntry(at_s=time.time(), kind="burn_in", subjects=subjects, reason=reason, data=data)
        try:
            await self._arbiter.note(entry)
        except NoArbiterError as error:  # it is in the run's all the same
            log.warning("%s", error)


async def _lost(error: str) -> Answer:
    return Answer(error=error)


async def _answer(reference: Any, within_s: float) -> Answer:
    try:
        answer: Answer = await asyncio.wait_for(reference, within_s)
        return answer
    except TimeoutError:
        ray.cancel(reference, force=True)
        return Answer(error=f"Ray brought no answer within {within_s:g} s")
    except ray.exceptions.RayError as error:  # its node is gone, or the grant
        return Answer(error=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")


def examined(told: str, limit_s: float) -> Answer:
    """A Ray task, on the node."""
    return ask_examiner(told, limit_s)
