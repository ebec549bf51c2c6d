"""Does a provider still make what it made? A canary's picture against its reference, and what follows. Pure."""

from __future__ import annotations

import io
from dataclasses import dataclass

from PIL import Image

from tidegate.serve.cooldown import Cooldown
from tidegate.spec.providers import CanarySpec

_GRID = 16
"""Pictures are compared at 16 x 16: grain, compression and other processors' rounding don't count, content does."""


@dataclass(frozen=True, slots=True)
class Look:
    """What the canaries have said of one provider. A fresh value is a provider in good standing."""

    strikes: int = 0
    """Drifted in a row."""
    good: int = 0
    """Good in a row, while closed."""
    closed: str | None = None
    """Why it is closed."""


def due(spec: CanarySpec, trouble: Cooldown, asked_at_s: float, now_s: float) -> bool:
    """Is it time for a provider's canary? Every `every_s`; and once after a rest is over, so that the probe of a
    provider that failed is no client's request."""
    if spec.every_s is None or trouble.resting(now_s):
        return False
    return now_s >= asked_at_s + spec.every_s or (trouble.failures > 0 and asked_at_s < trouble.until_s)


def judged(before: Look, found: str | None, spec: CanarySpec) -> Look:
    """After one more canary; `found` is what was wrong with its picture, None = nothing.

    `strikes` bad ones in a row close the provider, as many good ones in a row open it: one odd picture does neither.
    """
    if found is not None:
        strikes = before.strikes + 1
        closed = f"drifted: {found}" if before.closed or strikes >= spec.strikes else None
        return Look(strikes=strikes, closed=closed)
    if before.closed is None:
        return Look()
    good = before.good + 1
    return Look() if good >= spec.strikes else Look(good=good, closed=before.closed)


def difference(png: bytes, reference: bytes, spec: CanarySpec) -> str | None:
    """What is wrong with a canary's picture, None = nothing. Both are whole pictures; format and size count first."""
    with Image.open(io.BytesIO(png)) as got, Image.open(io.BytesIO(reference)) as wanted:
        if got.format != wanted.format:
            return f"format {got.format} instead of {wanted.format}"
        if got.size != wanted.size:
            return f"size {got.size[0]}x{got.size[1]} instead of {wanted.size[0]}x{wanted.size[1]}"
        far = distance(got, wanted)
    if far > spec.distance_max:
        return f"distance {far:.2f} from its reference, {spec.distance_max:.2f} is allowed"
    return None


def distance(one: Image.Image, other: Image.Image) -> float:
    """How differently two pictures look, 0 to 1: the greater of structure and colour, both at `_GRID` x `_GRID`.

    Structure: Σ|a - b| / Σ(|a| + |b|) over the steps in brightness between neighbours; strong edges weigh most, so
    noise on a plain ground counts little. Colour: the mean absolute difference of the RGB values, over 255.
    """
    steps = list(zip(_steps(one), _steps(other), strict=True))
    edges = sum(abs(a) + abs(b) for a, b in steps)
    structure = sum(abs(a - b) for a, b in steps) / max(edges, len(steps))
    cells = [picture.convert("RGB").resize((_GRID, _GRID), Image.Resampling.BOX).tobytes() for picture in (one, other)]
    colour = sum(abs(a - b) for a, b in zip(*cells, strict=True)) / (255 * len(cells[0]))
    return float(max(structure, colour))


def _steps(picture: Image.Image) -> list[int]:
    grey = picture.convert("L").resize((_GRID, _GRID), Image.Resampling.BOX).tobytes()
    across = [grey[i + 1] - grey[i] for i in range(len(grey)) if (i + 1) % _GRID]
    down = [grey[i + _GRID] - grey[i] for i in range(len(grey) - _GRID)]
    return across + down
