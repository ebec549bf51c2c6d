"""Asks each provider for its canary when that is due, keeps references, and closes a provider whose pictures drift."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from tidegate.clock import Clock
from tidegate.ids import ProviderName
from tidegate.serve.backends import Backends
from tidegate.serve.flow import CanaryPicture, Flow
from tidegate.serve.providers.parity import difference, due, judged
from tidegate.serve.work import ImageJob
from tidegate.spec.providers import CanarySpec

LOOK_S = 1.0
"""Between two looks at what is due."""

_LOG = logging.getLogger("ray.serve")


class Canaries:
    """`references`: a folder with one picture for each provider, model, size and prompt. A provider's first canary
    becomes its reference; to accept another look, remove the file or put a picture of your own there."""

    def __init__(
        self,
        spec: CanarySpec,
        names: Iterable[ProviderName],
        flow: Flow,
        backends: Backends,
        job: ImageJob,
        references: Path,
        clock: Clock,
    ) -> None:
        self._spec, self._flow, self._backends, self._clock = spec, flow, backends, clock
        self._job = replace(job, prompt=spec.prompt, seed=spec.seed)
        self._references = references
        self._asked_at_s = dict.fromkeys(names, 0.0)

    async def watch(self) -> None:
        """For ever, or not at all where the policy asks for none."""
        while self._spec.every_s is not None:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Ask whoever is due, all at the same time."""
        now_s = self._clock.now_s()
        names = [
            name
            for name, asked_at_s in self._asked_at_s.items()
            if due(self._spec, self._backends.trouble_of(name), asked_at_s, now_s)
        ]
        for name in names:
            self._asked_at_s[name] = now_s
        await asyncio.gather(*(self._ask(name) for name in names))

    async def _ask(self, name: ProviderName) -> None:
        job = replace(self._job, seed_asked=self._backends.repeats(name))
        _, picture = await self._flow.canary_of(name, "parity", job)
        if picture == CanaryPicture():
            return  # no picture: its health is the cooldown's matter
        before = self._backends.look_of(name)
        try:
            found = self._wrong_with(name, job, picture)
        except OSError as error:  # a full disk is no drift
            _LOG.warning("canary of %s: its reference can't be read or kept: %s", name, error)
            return
        after = judged(before, found, self._spec)
        self._backends.provider_looked(name, after)
        if after.closed != before.closed:
            _LOG.warning("provider %s: %s", name, after.closed or "its pictures are as they were, open again")
            self._flow.dispatcher.look()

    def _wrong_with(self, name: ProviderName, job: ImageJob, picture: CanaryPicture) -> str | None:
        if picture.png is None or not job.seed_asked:
            return picture.wrong  # without a seed each picture is another one: only size and format compare
        path = self._reference(name, job)
        if path.exists():
            return difference(picture.png, path.read_bytes(), self._spec)
        path.parent.mkdir(parents=True, exist_ok=True)
        half = path.with_suffix(".half")
        half.write_bytes(picture.png)
        half.replace(path)
        _LOG.info("canary of %s: its first picture is its reference from now on: %s", name, path)
        return None

    def _reference(self, name: ProviderName, job: ImageJob) -> Path:
        asked = hashlib.sha256(f"{job.model}|{job.prompt}|{job.seed}".encode()).hexdigest()[:12]
        return self._references / name / f"{asked}-{job.size}.png"
