"""Are the pictures of new weights fit to be seen? Judged before a client gets one. Pure."""

from __future__ import annotations

import io
import statistics
from collections.abc import Sequence

from PIL import Image

from tidegate.serve.providers.parity import distance
from tidegate.spec.weights import RolloutSpec


def problem(new: Sequence[bytes], old: Sequence[bytes], spec: RolloutSpec) -> str | None:
    """What is wrong with `new`, PNGs for `spec.prompts`; None: nothing. `old`: what the weights that serve made of the
    same, empty where none do."""
    pictures = [_opened(png) for png in new]
    for prompt, picture in zip(spec.prompts, pictures, strict=True):
        # Numbers that are none come out as one colour.
        if all(low == high for low, high in _extremes(picture)):
            return f"its picture of {prompt!r} has one colour"
    if not old:
        return None
    before = [_opened(png) for png in old]
    for one, other in zip(pictures, before, strict=True):
        if one.size != other.size:
            return f"makes {one.size[0]}x{one.size[1]}, what serves makes {other.size[0]}x{other.size[1]}"
    far = statistics.fmean(distance(one, other) for one, other in zip(pictures, before, strict=True))
    if spec.distance_max is not None and far > spec.distance_max:
        return f"its pictures are {far:.2f} from those of what serves, {spec.distance_max:.2f} is allowed"
    return None


def _opened(png: bytes) -> Image.Image:
    with Image.open(io.BytesIO(png), formats=("PNG",)) as image:
        image.load()
        return image.copy()


def _extremes(picture: Image.Image) -> list[tuple[int, int]]:
    return [channel.getextrema() for channel in picture.split()]  # type: ignore[misc]
