"""A GPU replica: one engine that gateways call. Torch is imported when the replica starts, not before."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from ray import serve
from ray.serve.schema import LoggingConfig
from ray.util import get_node_ip_address

from tidegate.arbiter.client import ArbiterClient
from tidegate.arbiter.messages import ReplicaReport, Stage, Weights
from tidegate.errors import ModelRefusedError, NoArbiterError
from tidegate.ids import PoolName
from tidegate.serve.hop.server import HopServer
from tidegate.serve.options import EngineOptions
from tidegate.serve.rehearsal import problem
from tidegate.serve.work import ImageJob, Made, Partial
from tidegate.spec.weights import RolloutSpec

if TYPE_CHECKING:
    from tidegate.serve.engine import Engine, Ready

T = TypeVar("T")

REPORT_S = 1.0
"""Between two words with the arbiter."""

MAX_ONGOING = 2
"""One at work, one ready to follow, so that the GPU doesn't wait for the network."""

_LOG = logging.getLogger("ray.serve")


@serve.deployment(max_ongoing_requests=MAX_ONGOING, logging_config=LoggingConfig(enable_access_log=False))
class ImagesReplica:
    """Serves what the arbiter tells it to of what is published, or `folder` where nothing is or all is refused."""

    async def __init__(  # type: ignore[misc]
        self,
        app: str,
        folder: str,
        options: EngineOptions,
        rollout: RolloutSpec,
        stuck_after_s: float,
        slots: int = MAX_ONGOING,
    ) -> None:
        # Serve awaits a constructor that is a coroutine.
        self._app, self._stuck_after_s = app, stuck_after_s
        self._ready = False
        replica = serve.get_replica_context().replica_id
        self._name, self._pool = replica.unique_id, PoolName(replica.deployment_id.name)
        self._arbiter = ArbiterClient(timeout_s=2.0)
        self._weights = Weights(version=0, uri=folder)
        """What serves; version 0 is `folder`, published ones count from 1."""
        self._refusals: dict[int, str] = {}
        """Why, by version: what was refused is not tried again."""
        self._folder, self._options, self._rollout = folder, options, rollout
        # The engine has a thread of its own; this one loads new weights meanwhile.
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="weights")
        self._loading: asyncio.Task[None] | None = None
        published = await self._report()
        # Loading can take minutes, in which a replica that says nothing is taken for lost.
        self._reporting = asyncio.get_running_loop().create_task(self._report_for_ever())
        self._engine = await self._in_loader(self._first_engine, published)
        self._hop = HopServer(self, slots)
        self._reached = await self._hop.open(get_node_ip_address())
        self._ready = True

    def record_replica_metadata(self) -> dict[str, str | int]:
        """Serve asks once, when the replica is made, and tells every gateway."""
        return self._reached

    async def __del__(self) -> None:
        """Serve calls this when the replica stops, and kills it at the drain deadline."""
        await self._hop.drain()

    def reconfigure(self, config: dict[str, str]) -> None:
        """Names the plan that this was built by; Serve keeps it to show it."""

    async def make(self, job: ImageJob) -> Made:
        """Make a job's pictures; image i from `seed + i`. A cancelled call stops between two denoise steps."""
        gone = threading.Event()
        try:
            pngs, compute_s = await asyncio.wrap_future(self._submit(job, gone))
        except asyncio.CancelledError:
            gone.set()
            raise
        return Made(pngs=pngs, seed=job.seed, compute_s=compute_s)

    async def make_shown(self, job: ImageJob) -> AsyncGenerator[Partial | Made, None]:
        """As `make`, with unfinished pictures before the answer, which comes last."""
        gone, items = threading.Event(), asyncio.Queue[Partial | Future[tuple[tuple[bytes, ...], float]]]()
        loop = asyncio.get_running_loop()

        def put(item: Partial | Future[tuple[tuple[bytes, ...], float]]) -> None:
            loop.call_soon_threadsafe(items.put_nowait, item)

        try:
            self._submit(job, gone, put).add_done_callback(put)
            while isinstance(item := await items.get(), Partial):
                yield item
            pngs, compute_s = item.result()
            yield Made(pngs=pngs, seed=job.seed, compute_s=compute_s)
        finally:
            gone.set()  # whoever listened may have left

    def _submit(
        self, job: ImageJob, gone: threading.Event, show: Callable[[Partial], None] | None = None
    ) -> Future[tuple[tuple[bytes, ...], float]]:
        return self._engine.submit(
            [job.prompt] * job.images,
            [job.seed + index for index in range(job.images)],
            size=job.size,
            steps=job.steps,
            guidance=job.guidance,
            negative=job.negative_prompt,
            cancelled=gone.is_set,
            partials=job.partial_images,
            show=show,
        )

    async def check_health(self) -> None:
        """Serve replaces the replica when this raises."""
        since_s = self._engine.busy_since_s
        if since_s is not None and time.monotonic() - since_s > self._stuck_after_s:
            raise RuntimeError(f"the engine has been at one step for more than {self._stuck_after_s:.0f} s")
        if self._reporting.done():
            raise RuntimeError(f"the report loop ended: {self._reporting.exception()!r}")

    async def _in_loader(self, call: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._loader, call, *args)

    def _first_engine(self, published: Weights | None) -> Engine:
        """What is published, else what was before it, else what the application was deployed with."""
        from tidegate.serve.engine import Engine  # here, so that building the app imports no torch
        from tidegate.serve.fetching import fetched

        deployed = self._weights
        before = [Weights(version=published.before_version, uri=published.before_uri)] if published else []
        for weights in (*([published] if published else []), *before):
            if weights.version == 0:
                continue
            try:
                engine = Engine(fetched(weights.uri), self._options)
                if weights.stage is Stage.CANARY:
                    self._rehearse(weights, engine, None)
            except ModelRefusedError as error:
                self._refuse(weights, error)
            else:
                self._weights = weights
                return engine
        return Engine(fetched(deployed.uri), self._options)

    async def _report_for_ever(self) -> None:
        while True:
            await asyncio.sleep(REPORT_S)
            told = await self._report()
            idle = self._loading is None or self._loading.done()
            if told is None or not self._ready or not idle:
                continue
            if told.version != self._weights.version and told.version not in self._refusals:
                self._loading = asyncio.get_running_loop().create_task(self._change(told))

    async def _change(self, weights: Weights) -> None:
        await self._in_loader(self._swap, weights)
        await self._report()

    def _swap(self, weights: Weights) -> None:
        from tidegate.serve.fetching import fetched

        try:
            staged = self._engine.stage(fetched(weights.uri if weights.version else self._folder))
            if weights.stage is Stage.CANARY:
                self._rehearse(weights, self._engine, staged)
        except ModelRefusedError as error:
            self._refuse(weights, error)
        except Exception as error:  # no memory for both, a bug of a library: what serves keeps serving
            _LOG.exception("replica %s: weights %d could not be loaded", self._name, weights.version)
            self._refuse(weights, ModelRefusedError(weights.uri, f"could not be loaded: {error}"[:300]))
        else:
            self._engine.serve(staged)
            self._weights = weights
            _LOG.info("replica %s serves weights %d from %s", self._name, weights.version, weights.uri)

    def _rehearse(self, weights: Weights, engine: Engine, staged: Ready | None) -> None:
        """Make the canary's pictures with `staged` and with what serves, or with a first engine alone.

        Raises:
            ModelRefusedError: they are not fit to be seen, or could not be made.
        """
        prompts, seed = self._rollout.prompts, self._rollout.seed
        seeds = range(seed, seed + len(prompts))
        try:
            new, _ = engine.submit(prompts, seeds, ready=staged).result()
            old = engine.submit(prompts, seeds).result()[0] if staged else ()
        except Exception as error:
            raise ModelRefusedError(weights.uri, f"its pictures could not be made: {error}") from error
        wrong = problem(new, old, self._rollout)
        if wrong is not None:
            raise ModelRefusedError(weights.uri, wrong)

    def _refuse(self, weights: Weights, error: ModelRefusedError) -> None:
        self._refusals[weights.version] = f"version {weights.version}: {error}"
        _LOG.warning("replica %s: %s", self._name, self._refusals[weights.version])

    async def _report(self) -> Weights | None:
        newest = max(self._refusals, default=0)
        report = ReplicaReport(
            replica=self._name,
            at_s=time.time(),
            serving_version=self._weights.version,
            refused=self._refusals[newest] if newest > self._weights.version else None,
            refused_version=newest if newest > self._weights.version else None,
            pool=self._pool,
        )
        try:
            return await self._arbiter.report_replica(self._app, report)
        except NoArbiterError:
            return None  # away: what serves keeps serving; the next report comes in REPORT_S
