"""The coordinator: a detached actor that claims GPUs for one run, leads its gang and lets go of them.

It only carries messages: what happens on an event is decided in `states.py`, who gets GPUs by the arbiter. Killed, it
is restarted by Ray, reads what it had kept, and goes on: neither agents nor Ray Train's controller are its children.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import ray

from tidegate.arbiter.client import BACK_WITHIN_S, NAMESPACE, ArbiterClient
from tidegate.arbiter.messages import JournalEntry
from tidegate.errors import ClaimUndoneError, NoArbiterError, RunExistsError, RunRefusedError
from tidegate.gang.agent import AgentJob
from tidegate.gang.burn_in import BurnIn
from tidegate.gang.events import (
    Beaten,
    Event,
    Evicted,
    Formed,
    Joined,
    LeaveAsked,
    Reattached,
    Regranted,
    StopAsked,
    Ticked,
    TrainEnded,
    TrainLost,
    Ungranted,
)
from tidegate.gang.host import end_host, find_host, start_host
from tidegate.gang.kept import Kept, read_kept, same_to_keep, write_kept
from tidegate.gang.order import RunOrder, RunStatus, accepts, clocks_problem, differences, mesh_problem
from tidegate.gang.placing import away_from_head, is_ready, spare_nodes
from tidegate.gang.plan import NEWS_WAIT_S, Formation, Gist, Member, Reply, Stacks
from tidegate.gang.report import Gauges, report_of, status_of
from tidegate.gang.shape import ENDED, Gang, Note, Status, is_asked_to_save, is_member, reply_to
from tidegate.gang.stacks import MOST_STACKS, write_stacks
from tidegate.gang.states import advance
from tidegate.gang.warm_node import start_warm
from tidegate.ids import ClaimId, Generation, GpuId, NodeId, coordinator_name
from tidegate.spec.policy import GangSpec
from tidegate.train.mesh import together

log = logging.getLogger(__name__)

JOURNAL = "gang.jsonl"
REPORT_EVERY_S = 0.5
GRANT_EVERY_S = 0.1
"""While it waits for a grant that is being made, for as long as that is likely."""
GRANT_SOON_S = 10.0
FORMATION_EVERY_S = 0.05
AWAIT_TRAIN_S = 0.1
SPARE_AGAIN_S = 2.0
WARM_SPARES = 4
"""Nodes beside the gang's own where torch is imported, should it have to move there."""
TRAIN_END_PATIENCE_S = 5.0
"""Ray Train ends by itself within about a second of its agents."""


class Coordinator:
    async def __init__(self, order: RunOrder) -> None:  # type: ignore[misc]  # Ray awaits it
        self._order = order
        self._run = order.claim.name
        self._run_dir = Path(order.run_dir)
        self._journal = self._run_dir / JOURNAL
        self._arbiter = ArbiterClient()
        self._changed = asyncio.Event()
        self._moved: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done, and another one in its place, when agents have something new to do."""
        self._starting = asyncio.Lock()
        self._gauges = Gauges(self._run)
        self._burn_in: BurnIn | None = None
        self._kept, self._generation = read_kept(self._run_dir, ray.get_runtime_context().get_actor_id())
        if self._kept.claim is not None and not self._kept.over:
            self._happen(Reattached())
            self._stop_if_told()
            self._begin_life()

    async def start(self, order: RunOrder) -> ClaimId:
        """File the claim and go on by itself; asked again with the same order it answers with the same claim.

        Raises:
            ClaimNeverFitsError: the cluster could never give it.
            RunExistsError: this run goes on with another order.
            RunRefusedError: its settings and the policy's contradict each other.
        """
        if differs := differences(self._order, order):
            raise RunExistsError(self._run, differs)
        async with self._starting:
            if self._kept.claim is None:
                await self._file()
        assert self._kept.claim is not None
        return self._kept.claim

    async def _file(self) -> None:
        self._run_dir.mkdir(parents=True, exist_ok=True)
        # A job that is submitted while the arbiter restarts is not lost.
        arbiter = ArbiterClient(patience_s=BACK_WITHIN_S)
        policy = await arbiter.policy()
        spec = policy.gang
        if problem := clocks_problem(spec, self._order.config) or mesh_problem(self._order):
            raise RunRefusedError(self._run, problem)
        claim = await arbiter.claim(self._order.claim)
        examine_by = policy.health if policy.health.burn_in.before_gang else None
        self._keep(replace(self._kept, claim=claim, spec=spec, examine_by=examine_by))
        self._begin_life()

    async def stop(self, reason: str) -> None:
        """Save, then leave."""
        self._keep(replace(self._kept, stop_reason=reason))
        self._stop_if_told()

    async def status(self) -> RunStatus:
        return status_of(self._kept.gang, self._kept.ended, self._order.config.steps, over=self._kept.over)

    # Agents and Ray Train

    async def join(self, member: Member) -> bool:
        """Whether the gang knows this agent now; it asks again until it does."""
        self._happen(Joined(member=member))
        gang = self._kept.gang
        # Where it isn't wanted its first beat tells it so.
        return gang is not None and (is_member(gang, member.node, member.agent) or member.node not in gang.nodes)

    async def beat(self, report: Beaten) -> Reply:
        self._happen(report)
        gang = self._kept.gang
        return reply_to(gang, report.node, report.agent) if gang is not None else Reply(stale=True)

    async def news(self, node: NodeId, agent: str, known: Gist) -> bool:
        """Return when the reply to this agent's next beat is another than the `known` one; False if it isn't for long.

        So what concerns an agent reaches it at once, and beats need not be frequent."""
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + NEWS_WAIT_S
        while True:
            gang, moved = self._kept.gang, self._moved
            reply = reply_to(gang, node, agent) if gang is not None else Reply(stale=True)
            if reply.gist != known:
                return True
            if loop.time() >= ends_s:
                return False
            await asyncio.wait((moved,), timeout=ends_s - loop.time())

    async def cleared(self, what: tuple[NodeId, Generation, float]) -> None:
        node, generation, at_s = what
        reason = f"{node[:12]} holds no rank of a generation before {generation}"
        data = {"node": node, "generation": generation, "gone_at_s": at_s}
        self._write(Note(kind="cleared", reason=reason, data=data))

    async def stacks(self, told: Stacks) -> None:
        """Where a hung generation's ranks stood on one node: kept with the run, and told to the arbiter's journal."""
        folder = self._run_dir / "stacks"
        reason = write_stacks(folder, told)
        self._write(Note(kind="stacks", reason=reason, data={"generation": told.generation, "folder": str(folder)}))
        claim = self._kept.claim
        if claim is None:
            return
        shown = told.ranks[:MOST_STACKS]
        entry = JournalEntry(
            at_s=time.time(),
            kind="stacks",
            subjects=(claim, told.node, *(slot.gpu for slot, _ in shown)),
            reason=reason,
            data={"folder": str(folder), "stacks": {f"rank {slot.rank} on {slot.gpu}": text for slot, text in shown}},
        )
        with contextlib.suppress(NoArbiterError):  # they are with the run all the same
            await self._arbiter.note(entry)

    async def formation(self, train: int, wait_s: float) -> Formation | None:
        """Where Ray Train may start its workers: the current grant's group once it is ready (and its nodes have passed
        their burn-in, where the policy wants one), None if it isn't in time or another controller leads."""
        ends_s = time.monotonic() + wait_s
        while time.monotonic() < ends_s:
            gang = self._kept.gang
            if gang is None or gang.train != train or gang.status in (*ENDED, Status.LEFT):
                return None
            ready = gang.grant_stands and await asyncio.to_thread(is_ready, gang.grant) and gang.grant is self._grant()
            if ready and not self._is_examining():
                await asyncio.to_thread(self._warm, gang.nodes)
                self._happen(Formed())
                return Formation(
                    group=gang.grant.placement_group,
                    nodes=len(gang.grant.nodes),
                    gpus_per_node=gang.grant.gpus_per_node,
                )
            await asyncio.sleep(FORMATION_EVERY_S)
        return None

    def _is_examining(self) -> bool:
        """Whether the start waits for a burn-in; begins one where it is due."""
        gang, claim, spec = self._kept.gang, self._kept.claim, self._kept.examine_by
        if spec is None or gang is None or claim is None:
            return False
        if self._burn_in is None:
            self._burn_in = BurnIn(claim, spec, self._arbiter, self._write, self._happen)
        return self._burn_in.holds(gang)

    # The arbiter

    async def evict(
        self, node: NodeId, gpu: GpuId | None, reason: str, reading_at_s: float, save_by_s: float | None = None
    ) -> None:
        """A GPU, or with None a whole node, leaves: at once, or with `save_by_s` after a save and by then."""
        data = {"node": node, "gpu": gpu, "reading_at_s": reading_at_s}
        self._write(Note(kind="verdict", reason=reason, data=data))
        self._happen(Evicted(node=node, gpu=gpu, reason=reason, save_by_s=save_by_s))

    # Its own life

    def _begin_life(self) -> None:
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._live()), loop.create_task(self._report())]

    async def _live(self) -> None:
        if self._kept.led < self._train():
            with contextlib.suppress(ray.exceptions.RayError):  # `_lead` asks for it again, and says why
                await self._host(self._train())  # its imports are done by the time of the grant
        try:
            while self._kept.ended is None:
                await self._granted()
                await self._lead()
                gang = self._kept.gang
                if gang is not None and gang.status in ENDED:
                    self._keep(replace(self._kept, ended=(str(gang.status), gang.reason)))
        except ClaimUndoneError as error:
            self._keep(replace(self._kept, ended=("failed", str(error))))
        except Exception as error:
            log.exception("the run ended badly")
            self._keep(replace(self._kept, ended=("failed", f"{type(error).__name__}: {error}")))
        await self._let_go()

    async def _granted(self) -> None:
        """Return once there is a grant to stand on, or nothing more to wait for."""
        claim, gang = self._kept.claim, self._kept.gang
        assert claim is not None
        while gang is None or gang.status is Status.LEFT:
            try:
                if gang is None and self._kept.stop_reason is not None:
                    await self._arbiter.release(claim, self._kept.stop_reason)
                grant = await self._arbiter.grant(claim, wait_s=2.0)
            except NoArbiterError as error:
                log.warning("%s", error)
                grant = None
            if grant is not None and gang is None:
                self._keep(replace(self._kept, gang=self._new_gang(grant)))
                reason = f"{sum(len(node.gpus) for node in grant.nodes)} GPUs on {len(grant.nodes)} nodes"
                nodes = [node.node for node in grant.nodes]
                self._write(Note(kind="granted", reason=reason, data={"nodes": nodes, "generation": grant.generation}))
                self._stop_if_told()
            elif grant is not None:
                self._happen(Regranted(grant=grant))
            gang = self._kept.gang
            if gang is None or gang.status is Status.LEFT:
                await asyncio.sleep(REPORT_EVERY_S)

    def _new_gang(self, grant: Any) -> Gang:
        return Gang(
            grant=grant,
            min_ranks=self._order.claim.min_gpus,
            max_ranks=self._order.claim.max_gpus,
            steps=self._order.config.steps,
            accepts=accepts(self._order),
            together=together(self._order.config.parallel),
            generation=self._generation,
        )

    async def _lead(self) -> None:
        """Keep one of Ray Train's controllers at work until the gang has ended or left."""
        while self._is_live():
            train = self._train()
            try:
                await self._lead_one(train)
            except (ray.exceptions.RayError, TimeoutError) as error:
                self._happen(TrainLost(train=train, error=f"{type(error).__name__}: {error}"))
            await asyncio.to_thread(end_host, self._run, train)
        await asyncio.to_thread(end_host, self._run, self._train() + 1)

    async def _lead_one(self, train: int) -> None:
        if self._kept.led == train and await asyncio.to_thread(find_host, self._run, train) is None:
            self._happen(TrainLost(train=train, error="its process is gone"))
            return
        host = await self._host(train)
        self._keep(replace(self._kept, led=train))
        node: NodeId = await asyncio.wait_for(host.ready.remote(), self._spec.join_deadline_s)
        led = asyncio.ensure_future(self._await(host.lead.remote(self._job(), train)))
        spare: asyncio.Task[None] | None = None
        try:
            while self._is_live() and self._train() == train:
                if spare is None and self._status() is Status.RUNNING:
                    spare = asyncio.ensure_future(self._keep_spare(train + 1, node))
                    await asyncio.to_thread(self._warm, spare_nodes(self._grant(), WARM_SPARES))
                if (await asyncio.wait({led}, timeout=AWAIT_TRAIN_S))[0]:
                    break
            if self._is_live() and self._train() == train:
                error = await led
                why = f"Ray Train: {error}" if error else "Ray Train's workers have ended"
                self._happen(TrainEnded(error=why) if error else TrainLost(train=train, error=why))
            elif not self._is_live():
                with contextlib.suppress(TimeoutError, ray.exceptions.RayError):  # it is ended by force next
                    await asyncio.wait_for(asyncio.shield(led), TRAIN_END_PATIENCE_S)
        finally:
            led.cancel()
            if spare is not None:
                spare.cancel()

    async def _keep_spare(self, train: int, leader: NodeId) -> None:
        """The next controller stands by, on another node than the one that leads; one that dies is replaced."""
        while True:
            try:
                await (await self._host(train, leader)).stand_by.remote()
            except ray.exceptions.RayError as error:
                log.warning("the spare Train controller has ended: %s", error)
            await asyncio.sleep(SPARE_AGAIN_S)

    async def _await(self, reference: Any) -> Any:
        return await reference

    async def _let_go(self) -> None:
        claim, ended = self._kept.claim, self._kept.ended
        assert claim is not None
        assert ended is not None
        for train in (self._train(), self._train() + 1):
            await asyncio.to_thread(end_host, self._run, train)
        self._gauges.end()
        while not self._kept.over:
            try:
                if self._kept.gang is not None:
                    await self._arbiter.report_gang(report_of(self._kept.gang, claim, time.time(), over=True))
                await self._arbiter.release(claim, ended[1])
                self._keep(replace(self._kept, over=True))
            except NoArbiterError as error:
                log.warning("cannot let go yet: %s", error)
                await asyncio.sleep(REPORT_EVERY_S)

    async def _report(self) -> None:
        """Tell the arbiter: at each change at once, else twice a second; do what it answers. The end is `_let_go`'s."""
        while self._kept.ended is None:
            gang, claim = self._kept.gang, self._kept.claim
            if gang is not None and claim is not None and gang.status not in ENDED:
                self._happen(Ticked())
                report = report_of(gang, claim, time.time(), over=False)
                self._gauges.show(report)
                try:
                    orders = await self._arbiter.report_gang(report)
                    if gang.status is not Status.LEFT:  # then `_granted` waits for it
                        grant = orders.grant
                        self._happen(Regranted(grant=grant) if grant is not None else Ungranted())
                    if orders.leave is not None:
                        self._happen(LeaveAsked(reason=orders.leave, by_s=orders.leave_by_s))
                except NoArbiterError as error:
                    log.warning("%s", error)
            lost_s = gang.fault_at_s if gang is not None and not gang.grant_stands else None
            waits = lost_s is not None and time.time() - lost_s < GRANT_SOON_S
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), GRANT_EVERY_S if waits else REPORT_EVERY_S)
            self._changed.clear()

    # Small pieces

    def _happen(self, event: Event) -> None:
        before = self._kept.gang
        if before is None:
            return
        gang, notes = advance(before, event, self._spec, time.time())
        self._keep(replace(self._kept, gang=gang))
        for note in notes:
            self._write(note)
        other = before.status is not gang.status or before.plan is not gang.plan
        if other:
            self._changed.set()
        if other or is_asked_to_save(before) != is_asked_to_save(gang):
            moved, self._moved = self._moved, asyncio.get_running_loop().create_future()
            moved.set_result(None)

    def _stop_if_told(self) -> None:
        if self._kept.stop_reason is not None:
            self._happen(StopAsked(reason=self._kept.stop_reason))

    def _keep(self, kept: Kept) -> None:
        """Written before anybody acts on it: a generation must never be given out twice."""
        before, self._kept = self._kept, kept
        if not same_to_keep(before, kept):
            write_kept(self._run_dir, kept)

    def _write(self, note: Note) -> None:
        line = {"at_s": time.time(), **asdict(note)}
        with self._journal.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _job(self) -> AgentJob:
        return AgentJob(
            coordinator=coordinator_name(self._run),
            config=self._order.config,
            data_dir=self._order.data_dir,
            run_dir=self._order.run_dir,
            heartbeat_s=self._spec.heartbeat_s,
            silent_after_s=self._spec.coordinator_silent_after_s,
            secret=self._kept.actor,
        )

    def _warm(self, nodes: tuple[NodeId, ...]) -> None:
        for node in nodes:
            start_warm(node)

    async def _host(self, train: int, *elsewhere: NodeId) -> Any:
        """In a thread: it asks the head, who may be away, and agents must be answered meanwhile."""

        def start() -> Any:
            return start_host(self._run, train, away_from_head(self._spec.off_head, *elsewhere))

        return await asyncio.to_thread(start)

    @property
    def _spec(self) -> GangSpec:
        assert self._kept.spec is not None
        return self._kept.spec

    def _grant(self) -> Any:
        return self._kept.gang.grant if self._kept.gang is not None else None

    def _status(self) -> Status | None:
        return self._kept.gang.status if self._kept.gang is not None else None

    def _train(self) -> int:
        return self._kept.gang.train if self._kept.gang is not None else 1

    def _is_live(self) -> bool:
        return self._status() not in (*ENDED, Status.LEFT, None)


def start_coordinator(order: RunOrder, *, off_head: bool = True) -> Any:
    """The run's coordinator, started or found. Detached and restarted for ever: it outlives the job and its node."""
    return (
        ray.remote(Coordinator)
        .options(
            name=coordinator_name(order.claim.name),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            num_cpus=0,
            max_concurrency=10_000,  # one call of each node waits for news
            **away_from_head(off_head),
        )
        .remote(order)
    )
