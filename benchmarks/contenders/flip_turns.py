"""One turn of one contender in the flip: GPUs that serve become a gang's, from the ask to the gang's first step."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import ray
from benchmarks.contenders.first_step import Stepper, stepped_at_s
from benchmarks.contenders.light_gang import Host, by_ray_train
from ray import serve
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tidegate.arbiter.client import NAMESPACE, ArbiterClient
from tidegate.arbiter.messages import ClaimSpec, Grant
from tidegate.arbiter.on_ray import NAME_LABEL
from tidegate.errors import TidegateError
from tidegate.ids import ClaimId, Tier, coordinator_name

NODES = ("node-a", "node-b", "node-c")
"""Of one GPU each, so any contender's replicas and the gang's workers fit each other."""
WORKERS = 2
"""GPUs that the gang takes. One replica is left, because Serve refuses to be deployed with none."""
FLOOR_NODES = ("node-d", "node-e")
"""Of one GPU each, kept from the arbiter."""
APP = "images"
PEERS: dict[str, dict[str, float]] = {
    "default": {},
    # No shorter timeout: requests of 3 s would fail.
    "tuned": {"graceful_shutdown_wait_loop_s": 0.1},
}
"""The peer's applications and what each sets beside its replicas."""
LEFT_S = 120.0


class TurnError(TidegateError):
    """Something did not come about in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Took:
    """Seconds since the ask."""

    gpus_s: float
    """Until the gang's placement group had its GPUs."""
    step_s: float
    """Until every worker of the gang had made its first step."""


class Newcomer:
    """Sees when a placement group that was not there before has its GPUs; the same eyes for every contender."""

    PERIOD_S = 0.01

    def __init__(self) -> None:
        self._before = set(ray.util.placement_group_table())
        self._gone = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="newcomer", daemon=True)
        self.created_at_s: float | None = None

    def __enter__(self) -> Newcomer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._gone.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._gone.wait(self.PERIOD_S):
            for name, row in ray.util.placement_group_table().items():
                if name not in self._before and row["state"] == "CREATED":
                    self.created_at_s = time.time()
                    return


@ray.remote(num_cpus=0)
class Presence:
    """The arbiter takes a claim back whose coordinator is gone; this one is there."""

    def here(self) -> bool:
        return True


@ray.remote(num_cpus=0)
class Holder:
    """What a replica is to the floor: a process that holds a GPU."""

    def here(self) -> bool:
        return True


@dataclass(slots=True, kw_only=True)
class Lanes:
    """Each contender's replicas on one cluster. The peers' hold a resource of their own name instead of GPUs, so that
    the arbiter leaves them alone and no turn disturbs another's replicas."""

    dashboard_url: str
    http_port: int
    policy: Path
    service_s: float
    folder: Path
    replicas: dict[str, int] = field(init=False, default_factory=lambda: dict.fromkeys(PEERS, len(NODES)))
    _arbiter: ArbiterClient = field(init=False, default_factory=lambda: ArbiterClient(timeout_s=20.0))
    _claims: list[tuple[ClaimId, Any]] = field(init=False, default_factory=list)
    _holders: list[Any] = field(init=False, default_factory=list)
    _groups: list[Any] = field(init=False, default_factory=list)
    _turns: int = field(init=False, default=0)

    # Turns: each leaves its gang's GPUs taken until `restore`

    def ours(self) -> Took:
        name = f"flip-{self._next()}"
        presence = Presence.options(name=coordinator_name(name), namespace=NAMESPACE).remote()
        ray.get(presence.here.remote())
        spec = ClaimSpec(name=name, claim_class="pretrain", max_gpus=WORKERS, min_gpus=WORKERS, owner="benchmark")
        with Newcomer() as seen:
            asked_at_s = time.time()
            host = Host.remote()
            grant = asyncio.run(self._claim(spec))
            self._claims.append((grant.claim, presence))
            stepped = ray.get(host.lead.remote(self.folder / name, WORKERS, grant.placement_group), timeout=LEFT_S)
        return _took(asked_at_s, seen, stepped)

    async def _claim(self, spec: ClaimSpec) -> Grant:
        claim = await self._arbiter.claim(spec)
        grant = None
        while grant is None:
            grant = await self._arbiter.grant(claim)
        return grant

    def peer(self, name: str) -> Took:
        """A config change to fewer replicas, then Ray Train."""
        folder = self.folder / f"{name}-{self._next()}"
        with Newcomer() as seen:
            asked_at_s = time.time()
            self.replicas[name] = len(NODES) - WORKERS
            self.deploy()
            stepped = by_ray_train(folder, WORKERS, name)
        return _took(asked_at_s, seen, stepped)

    def floor(self) -> Took:
        """What Ray itself takes when nobody is asked: kill the holders, reserve, start an actor in each bundle."""
        name = f"floor-{self._next()}"
        folder = self.folder / name
        folder.mkdir()
        with Newcomer() as seen:
            asked_at_s = time.time()
            for holder in self._holders:
                ray.kill(holder)
            selectors = [{NAME_LABEL: node} for node in FLOOR_NODES]
            group = placement_group([{"GPU": 1}] * WORKERS, name=name, bundle_label_selector=selectors)
            self._groups.append(group)
            bundles = [PlacementGroupSchedulingStrategy(group, bundle) for bundle in range(WORKERS)]
            actors = [Stepper.options(scheduling_strategy=bundle).remote() for bundle in bundles]
            ray.get([actor.step.remote({"folder": str(folder)}) for actor in actors], timeout=LEFT_S)
        return _took(asked_at_s, seen, stepped_at_s(folder, WORKERS))

    def _next(self) -> int:
        self._turns += 1
        return self._turns

    # Before and after

    def deploy(self) -> None:
        """What `serve deploy` does, without the seconds that its process takes to start."""
        applications: list[dict[str, Any]] = [
            {
                "name": APP,
                "route_prefix": "/",
                "import_path": "benchmarks.contenders.light_apps:images",
                "args": {"policy": str(self.policy), "service_s": self.service_s},
            }
        ]
        for name, settings in PEERS.items():
            workers = {"name": "Worker", "num_replicas": self.replicas[name], **settings}
            applications.append(
                {
                    "name": name,
                    "route_prefix": f"/{name}",
                    "import_path": "benchmarks.contenders.light_apps:peer",
                    "args": {"resource": name, "service_s": self.service_s},
                    "deployments": [workers],
                }
            )
        config = {
            "proxy_location": "HeadOnly",
            "http_options": {"host": "127.0.0.1", "port": self.http_port},
            "applications": applications,
        }
        url = f"{self.dashboard_url}/api/serve/applications/"
        httpx.put(url, json=config, timeout=60.0).raise_for_status()

    def open(self) -> None:
        """Before the first turn."""
        for node in FLOOR_NODES:
            asyncio.run(self._arbiter.quarantine(node, Tier.NONE, "the floor's"))
        self.restore()

    def restore(self) -> None:
        """Everybody serves with all replicas again."""
        for claim, _ in self._claims:
            asyncio.run(self._arbiter.release(claim, "its turn is over"))
        for group in self._groups:
            remove_placement_group(group)
        self.replicas = dict.fromkeys(PEERS, len(NODES))
        self.deploy()
        for holder in self._holders:
            ray.kill(holder)
        self._holders = [Holder.options(num_gpus=1, label_selector={NAME_LABEL: node}).remote() for node in FLOOR_NODES]
        ray.get([holder.here.remote() for holder in self._holders])
        _wait(self._at_home, "all of our replicas are home")
        for name in PEERS:
            _wait(lambda name=name: _serving(name) == len(NODES), f"all replicas of {name} run")
        for _, presence in self._claims:
            ray.kill(presence)
        self._claims, self._groups = [], []

    def _at_home(self) -> bool:
        status = asyncio.run(self._arbiter.status())
        open_claims = [claim for claim in status["claims"] if claim["state"] not in ("done", "undone")]
        return (
            not open_claims
            and sum(pool["running"] for pool in status["pools"]) == len(NODES)
            and status["spillway"] == "closed"
        )


def _took(asked_at_s: float, seen: Newcomer, stepped_at_s: float) -> Took:
    if seen.created_at_s is None:
        raise TurnError("no new placement group was seen, yet a gang made its first step")
    return Took(gpus_s=seen.created_at_s - asked_at_s, step_s=stepped_at_s - asked_at_s)


def _serving(app: str) -> int:
    found = serve.status().applications.get(app)
    if found is None or "Worker" not in found.deployments:
        return 0
    states = found.deployments["Worker"].replica_states
    return states.get("RUNNING", 0) if sum(states.values()) == states.get("RUNNING", 0) else 0


def _wait(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LEFT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TurnError(f"waited {LEFT_S:.0f} s in vain: {what}")
        time.sleep(0.1)
