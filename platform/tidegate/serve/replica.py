"""A GPU replica: one engine behind a Serve handle. Torch is imported when the replica starts, not before."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from ray import serve
from ray.serve.schema import LoggingConfig

from tidegate.arbiter.client import ArbiterClient
from tidegate.arbiter.messages import ReplicaReport, Weights
from tidegate.errors import ModelRefusedError, NoArbiterError
from tidegate.ids import PoolName
from tidegate.serve.options import EngineOptions
from tidegate.serve.work import ImageJob, Made, Partial

if TYPE_CHECKING:
    from tidegate.serve.engine import Engine

REPORT_S = 1.0
"""Between two words with the arbiter."""

MAX_ONGOING = 2
"""One at work, one ready to follow, so that the GPU doesn't wait for the network."""

_LOG = logging.getLogger("ray.serve")


@serve.deployment(max_ongoing_requests=MAX_ONGOING, logging_config=LoggingConfig(enable_access_log=False))
class ImagesReplica:
    """Serves the newest published weights, or `folder` where none are published or they are refused."""

    async def __init__(  # type: ignore[misc]
        self, app: str, folder: str, options: EngineOptions, stuck_after_s: float
    ) -> None:
        # Serve awaits a constructor that is a coroutine.
        self._app, self._stuck_after_s = app, stuck_after_s
        replica = serve.get_replica_context().replica_id
        self._name, self._pool = replica.unique_id, PoolName(replica.deployment_id.name)
        self._arbiter = ArbiterClient(timeout_s=2.0)
        self._version = 0
        """0 = `folder`; published ones count from 1."""
        self._tried = 0
        """The newest version that was loaded or refused."""
        self._refused: str | None = None
        # The engine has a thread of its own; this one loads new weights meanwhile.
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="weights")
        published = await self._report()
        self._engine = await asyncio.get_running_loop().run_in_executor(
            self._loader, self._first_engine, Path(folder), options, published
        )
        self._reporting = asyncio.get_running_loop().create_task(self._report_for_ever())

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

    async def make_shown(self, job: ImageJob) -> AsyncIterator[Partial | Made]:
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

    def _first_engine(self, folder: Path, options: EngineOptions, published: Weights | None) -> Engine:
        from tidegate.serve.engine import Engine  # here, so that building the app imports no torch

        if published is not None:
            self._tried = published.version
            try:
                engine = Engine(Path(published.uri), options)
            except ModelRefusedError as error:
                self._refuse(published, error)
            else:
                self._version = published.version
                return engine
        return Engine(folder, options)

    async def _report_for_ever(self) -> None:
        while True:
            await asyncio.sleep(REPORT_S)
            weights = await self._report()
            if weights is not None and weights.version > self._tried:
                await asyncio.get_running_loop().run_in_executor(self._loader, self._swap, weights)
                await self._report()

    def _swap(self, weights: Weights) -> None:
        self._tried = weights.version
        try:
            self._engine.swap(Path(weights.uri))
        except ModelRefusedError as error:
            self._refuse(weights, error)
        else:
            self._version, self._refused = weights.version, None
            _LOG.info("replica %s serves weights %d from %s", self._name, weights.version, weights.uri)

    def _refuse(self, weights: Weights, error: ModelRefusedError) -> None:
        self._refused = f"version {weights.version}: {error}"
        _LOG.warning("replica %s: %s", self._name, error)

    async def _report(self) -> Weights | None:
        report = ReplicaReport(
            replica=self._name,
            at_s=time.time(),
            serving_version=self._version,
            refused=self._refused,
            pool=self._pool,
        )
        try:
            return await self._arbiter.report_replica(self._app, report)
        except NoArbiterError:
            return None  # away: what serves keeps serving; the next report comes in REPORT_S
