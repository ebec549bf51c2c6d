"""What stands behind every face of the stand-in provider: slots, time, scripted faults, cheap pictures, counts."""

from __future__ import annotations

import asyncio
import io
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

from PIL import Image, ImageDraw
from pydantic import BaseModel, ConfigDict, Field


class Fault(StrEnum):
    """What goes wrong. The queue faces (fal, Replicate) take a request and work on it later, so each fault says where
    it strikes: at the submission, during the work, or in the answer."""

    STATUS = "status"
    """The submission is answered by `status` (and `retry_after`); nothing is made."""
    RESET = "reset"
    """The connection is reset (TCP RST) when the request has been read; nothing is made, but the client can't know."""
    DROP = "drop"
    """The request is taken and the picture made, but the answer to the submission is cut off."""
    HANG = "hang"
    """Taken, and never done."""
    FAIL = "fail"
    """Taken, and the work fails. OpenAI's face answers 500."""
    EMPTY = "empty"
    """A success without pictures."""
    WRONG_SIZE = "wrong_size"
    """A success with pictures of 8x8 more than asked."""
    WRONG_LOOK = "wrong_look"
    """A success with pictures of another prompt: a provider that has quietly changed its model."""
    DRIP = "drip"
    """The pictures come, a few bytes every `DRIP_S`."""


DRIP_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What one request wants, whichever face it came through."""

    prompt: str
    images: int
    width: int
    height: int
    seed: int | None
    key: str | None
    """Its idempotency key."""


class Control(BaseModel):
    """What to do from now on. Fields that are not named stay as they are."""

    model_config = ConfigDict(extra="forbid")

    fault: Fault | None = None
    times: Annotated[int, Field(ge=0)] = 1
    """How many requests get `fault`; 0 takes back what is left of the last one."""
    status: int = 500
    retry_after: str | None = None
    """As it stands in the header: seconds, or a date."""
    latency_s: Annotated[float, Field(ge=0)] | None = None
    """The median."""
    latency_sigma: Annotated[float, Field(ge=0, le=3)] | None = None
    """Of the logarithm (log-normal); 0 = each request takes `latency_s`."""
    slots: Annotated[int, Field(ge=0)] | None = None
    """Requests that it works on at a time. OpenAI's face refuses the next one, the queue faces let it wait."""
    queue_max: Annotated[int, Field(ge=0)] | None = None
    """Requests that may wait at the queue faces; above it they refuse."""
    key: str | None = None
    """What callers must show from now on; empty = nothing."""
    files_at: str | None = None
    """Where the queue faces say that pictures lie, `http://HOST:PORT/`; empty = here."""
    refuse_response_format: bool | None = None
    """As OpenAI's newer image models do."""
    forget: bool = False
    """The queue faces drop whatever they hold."""


class BusyError(Exception):
    """All slots (or all places in the queue) are taken."""


class Studio:
    """The provider's state; single-threaded like its event loop."""

    def __init__(self, model: str, latency_s: float, slots: int, latency_sigma: float = 0.0, key: str = "") -> None:
        self.model, self.latency_s, self.slots, self.latency_sigma = model, latency_s, slots, latency_sigma
        self.key = key
        """What callers must show; empty = anybody may ask."""
        self.queue_max = 1000
        self.files_at = ""
        self.refuse_response_format = False
        self.ongoing = 0
        self.counts: Counter[str] = Counter()
        self.keys: Counter[str] = Counter()
        self.script = Control(times=0)
        self.faults_left = 0
        self._dice = random.Random(0)
        self._waiting = 0
        self._changed = asyncio.Event()

    def control(self, order: Control) -> None:
        for name in ("latency_s", "latency_sigma", "slots", "queue_max", "key", "files_at", "refuse_response_format"):
            value = getattr(order, name)
            if value is not None:
                setattr(self, name, value)
        if order.fault is not None:
            self.script, self.faults_left = order, order.times
        self._wake()

    def stats(self) -> dict[str, Any]:
        names = ("requests", "answered", "refused", "images", "faults", "cancelled", "polls")
        bought_twice = sum(1 for times in self.keys.values() if times > 1)
        return {name: self.counts[name] for name in names} | {
            "ongoing": self.ongoing,
            "waiting": self._waiting,
            "ongoing_max": self.counts["ongoing_max"],
            "bought_twice": bought_twice,
            "slots": self.slots,
        }

    def next_fault(self) -> Fault | None:
        if not self.faults_left:
            return None
        self.faults_left -= 1
        self.counts["faults"] += 1
        return self.script.fault

    async def work_now(self, order: Order, fault: Fault | None) -> list[bytes]:
        """Take a slot, work, and give the pictures.

        Raises:
            BusyError: no slot is free.
        """
        if self.ongoing >= self.slots:
            raise BusyError
        return await self._work(order, fault)

    async def work_when_free(self, order: Order, fault: Fault | None, on_begin: Callable[[], None]) -> list[bytes]:
        """The same after a wait for a slot; `on_begin` is called when the work begins."""
        self._waiting += 1
        try:
            while self.ongoing >= self.slots:
                await self._changed.wait()
        finally:
            self._waiting -= 1
        on_begin()
        return await self._work(order, fault)

    def has_room(self) -> bool:
        return self._waiting < self.queue_max

    async def _work(self, order: Order, fault: Fault | None) -> list[bytes]:
        self.ongoing += 1
        self.counts["ongoing_max"] = max(self.counts["ongoing_max"], self.ongoing)
        try:
            if fault is Fault.HANG:
                await asyncio.Event().wait()
            await asyncio.sleep(self.latency_s * math.exp(self._dice.gauss(0.0, 1.0) * self.latency_sigma))
        finally:
            self.ongoing -= 1
            self._wake()
        return self._made(order, fault)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _made(self, order: Order, fault: Fault | None) -> list[bytes]:
        if fault in (Fault.EMPTY, Fault.FAIL):
            return []
        grow = 8 if fault is Fault.WRONG_SIZE else 0
        prompt = f"{order.prompt}, changed" if fault is Fault.WRONG_LOOK else order.prompt
        first = random.randrange(2**31) if order.seed is None else order.seed
        self.counts["answered"] += 1
        self.counts["images"] += order.images
        if order.key is not None:
            self.keys[order.key] += 1
        return [draw(prompt, first + i, order.width + grow, order.height + grow) for i in range(order.images)]


def draw(prompt: str, seed: int, width: int, height: int) -> bytes:
    """A PNG of coloured boxes; equal prompt and seed give equal bytes."""
    dice = random.Random(f"{prompt}|{seed}")
    image = Image.new("RGB", (width, height), tuple(dice.randrange(256) for _ in range(3)))
    pen = ImageDraw.Draw(image)
    for _ in range(3):
        left, top = dice.randrange(width), dice.randrange(height)
        right, bottom = left + dice.randrange(1 + width // 2), top + dice.randrange(1 + height // 2)
        pen.rectangle((left, top, right, bottom), fill=tuple(dice.randrange(256) for _ in range(3)))
    out = io.BytesIO()
    image.save(out, "PNG", compress_level=1)
    return out.getvalue()
