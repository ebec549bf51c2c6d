"""The load test's story on a cluster that serves: what is done to it while the clients go on asking."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import ray
from benchmarks.contenders.flip_turns import Presence

from tidegate.arbiter.client import NAMESPACE, ArbiterClient
from tidegate.arbiter.messages import ClaimSpec
from tidegate.errors import TidegateError
from tidegate.ids import ClaimId, coordinator_name
from tidegate.testing.local_cluster import end_with_parent

DROPS = 3
"""Pictures that the provider makes, is paid for and does not deliver, just before it dies."""

WAIT_S = 120.0
BOOKS = ("requests", "answered", "refused", "cancelled", "bought_twice")


class StoryError(TidegateError):
    """Something did not come about in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    name: str
    began_at_s: float
    ended_at_s: float
    replicas: int
    """Running when it ended."""


@dataclass(slots=True, kw_only=True)
class Provider:
    """The stand-in as a process that can be killed, and what it has done in all its lives."""

    port: int
    latency_s: float
    slots: int
    books: Counter[str] = field(init=False, default_factory=Counter)
    _process: subprocess.Popen[bytes] | None = field(init=False, default=None)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Provider:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        options = ["--port", str(self.port), "--latency-s", str(self.latency_s), "--slots", str(self.slots)]
        command = [sys.executable, "-m", "tidegate.testing.standin_provider", *options]
        self._process = subprocess.Popen(command, preexec_fn=end_with_parent)
        wait_for(self._answers, "the stand-in provider answers")

    def drop(self, times: int) -> None:
        httpx.post(f"{self.url}/control", json={"fault": "drop", "times": times}).raise_for_status()
        wait_for(lambda: self._stats()["faults"] >= times, "the scripted faults have happened")

    def kill(self) -> None:
        """SIGKILL, with whatever it has in hand."""
        if self._process is not None:
            stats = self._stats()
            self.books.update({name: stats[name] for name in BOOKS})
            self._process.kill()
            self._process.wait()
            self._process = None

    def _stats(self) -> dict[str, int]:
        stats: dict[str, int] = httpx.get(f"{self.url}/stats", timeout=5.0).json()
        return stats

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=2.0).status_code == 200
        except httpx.HTTPError:
            return False


@dataclass(slots=True, kw_only=True)
class Story:
    """Each phase ends when what it is about has come about and has lasted for its seconds."""

    provider: Provider
    replicas: int
    """All that fit; the claim takes every GPU."""
    say: Callable[[str], None]
    phases: list[Phase] = field(init=False, default_factory=list)
    _arbiter: ArbiterClient = field(init=False, default_factory=lambda: ArbiterClient(timeout_s=20.0))
    _began_at_s: float = field(init=False, default=0.0)
    _presence: Any = field(init=False, default=None)
    _claims: int = field(init=False, default=0)

    def play(self, phase_s: float) -> None:
        """Steady, claimed, provider down, provider back, returned: `phase_s` each, the third half as long."""
        self._begin()
        self._end("steady", phase_s)
        claim = self.claim()
        self._end("claimed to zero", phase_s)
        self.provider.drop(DROPS)
        self.provider.kill()
        self._end("provider down", phase_s / 2)
        self.provider.start()
        self._end("provider back", phase_s)
        self.give_back(claim)
        self._end("returned", phase_s)

    def claim(self) -> ClaimId:
        """Every GPU, until `give_back`; returns when no replica runs."""
        self._claims += 1
        claim = asyncio.run(self._claim(f"load-{self._claims}"))
        wait_for(lambda: self.running() == 0, "no replica runs")
        return claim

    def give_back(self, claim: ClaimId) -> None:
        """Returns when all replicas are home and the spillway is closed."""
        asyncio.run(self._arbiter.release(claim, "the load test gives it back"))
        wait_for(self.home, "all replicas are home and the spillway is closed")
        ray.kill(self._presence)

    def running(self) -> int:
        return sum(pool["running"] for pool in self._status()["pools"])

    def home(self) -> bool:
        status = self._status()
        running = sum(pool["running"] for pool in status["pools"])
        return running == self.replicas and bool(status["spillway"] == "closed")

    def _status(self) -> dict[str, Any]:
        return asyncio.run(self._arbiter.status())

    async def _claim(self, name: str) -> ClaimId:
        self._presence = Presence.options(name=coordinator_name(name), namespace=NAMESPACE).remote()
        await self._presence.here.remote()
        gpus = self.replicas
        spec = ClaimSpec(name=name, claim_class="pretrain", max_gpus=gpus, min_gpus=gpus, owner="load test")
        claim = await self._arbiter.claim(spec)
        async with asyncio.timeout(WAIT_S):
            while await self._arbiter.grant(claim) is None:
                pass
        return claim

    def _begin(self) -> None:
        self._began_at_s = time.time()

    def _end(self, name: str, lasts_s: float) -> None:
        """When its state has lasted for so long."""
        time.sleep(lasts_s)
        now_s = time.time()
        phase = Phase(name=name, began_at_s=self._began_at_s, ended_at_s=now_s, replicas=self.running())
        self.phases.append(phase)
        self.say(f"{name}: {now_s - phase.began_at_s:.0f} s, {phase.replicas} replicas run")
        self._begin()


def wait_for(condition: Callable[[], bool], what: str, deadline_s: float = WAIT_S) -> None:
    """
    Raises:
        StoryError: `condition` is not true in time.
    """
    deadline = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > deadline:
            raise StoryError(f"waited {deadline_s:.0f} s in vain: {what}")
        time.sleep(0.1)
