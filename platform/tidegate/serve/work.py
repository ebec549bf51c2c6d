"""What the serve room's parts hand each other: one request as it is made, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tidegate.ids import RequestId


class Size(NamedTuple):
    """Pixels. Written `WxH`, as in OpenAI's API."""

    width: int
    height: int

    def __str__(self) -> str:
        return f"{self.width}x{self.height}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageJob:
    """An admitted request: checked, bounded, defaults filled in."""

    request: RequestId
    model: str
    prompt: str
    images: int
    size: Size
    seed: int
    """Image i is made with `seed + i`."""
    seed_asked: bool
    """The client named the seed, so a provider must honour it; a drawn one is nobody's wish."""
    steps: int | None
    """Denoise steps; None = the model's own."""
    local_only: bool
    guidance: float | None = None
    """Krea 2's scale: 0 = none, g is 1 + g in the usual one; None = the model's own."""
    negative_prompt: str = ""
    hedge: bool = False
    """It may be made, and bought, twice, where that is sooner."""
    priority: int = 0
    """Lower ones are placed first; among equals the one that came first."""
    partial_images: int = 0
    """Unfinished pictures that the client wants to see of each on the way, at most; only what is made here has any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partial:
    """A picture on the way."""

    image: int
    """Of the request's pictures, from 0."""
    index: int
    """Of this picture's unfinished ones, from 0."""
    png: bytes
    steps_done: int
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """Pictures, wherever they were made."""

    pngs: tuple[bytes, ...]
    seed: int | None
    """None where a provider drew its own."""
    compute_s: float = 0.0
    """GPU-seconds that it took here; 0 at a provider."""


# --- errors of a local attempt. Making a picture changes nothing, so each of them may be tried again elsewhere.


class PoolBusyError(Exception):
    """No replica of the pool has a free slot (or it has none at all): the request was not sent."""


class PoolLostError(Exception):
    """The replica went away with the request in its hands."""


class EngineFailedError(Exception):
    """The replica lives, yet could not make this picture."""


class UnfitError(Exception):
    """What is asked for doesn't fit into the replica's memory; nothing was tried."""

    def __init__(self, param: str, why: str) -> None:
        super().__init__(param, why)
        self.param, self.why = param, why
