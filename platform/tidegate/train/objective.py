"""Rectified flow as tensor functions. What a sample sees depends on (seed, step, its place in the global batch) alone,
so any number of ranks computes the same thing."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tidegate.train.config import ObjectiveSpec, Shift

_CAPTIONS = 1
"""Keeps the draw about captions apart from noise and times, whose streams count up from 0 in the word below."""


def draw(
    seed: int,
    step: int,
    positions: Sequence[int],
    shape: Sequence[int],
    spec: ObjectiveSpec,
    shift: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Noise (B, *shape) and times (B,) for the samples at `positions` of the global batch of `step`, float32.

    `shift`: instead of `spec`'s own, which must be a number where this is None.

    Philox is a counter-based generator: the counter's upper half holds (position, step), so each sample has a stream of
    its own that is found without drawing the others.
    """
    size = int(np.prod(shape))
    drawn = np.empty((len(positions), size + 1), dtype=np.float32)
    for row, position in zip(drawn, positions, strict=True):
        stream = np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, position, step]))
        stream.standard_normal(dtype=np.float32, out=row)
    both = torch.from_numpy(drawn)
    return both[:, 1:].reshape(-1, *shape), times_of(both[:, 0], spec, shift)


def times_of(normal: Tensor, spec: ObjectiveSpec, shift: float | None = None) -> Tensor:
    """Standard normal numbers -> logit-normal times in (0, 1), shifted by t' = s·t / (1 + (s-1)·t); 1 is pure noise."""
    if shift is None:
        shift = shift_of(spec.shift)
    times = torch.sigmoid(normal * spec.timestep_std + spec.timestep_mean)
    return shift * times / (1 + (shift - 1) * times)


def shift_of(shift: Shift, tokens: int | None = None) -> float:
    """s as a number. `resolution` is Krea 2's rule: s = e^μ, μ linear in the number of image tokens through 0.5 at 256
    (256² pixels) and 1.15 at 6400 (1280²), and on beyond them: diffusers' `calculate_shift` as its pipeline calls it.
    """
    if shift != "resolution":
        return shift
    if tokens is None:
        raise ValueError("shift by resolution needs the number of image tokens")
    return math.exp(0.5 + (1.15 - 0.5) * (tokens - 256) / (6400 - 256))


def without_caption(seed: int, step: int, positions: Sequence[int], share: float) -> list[bool]:
    """Whether each of the samples at `positions` of the global batch of `step` is learnt without its caption: `share`
    of them are, whichever ranks they are on."""
    if not share:
        return [False] * len(positions)
    streams = (np.random.Philox(key=seed, counter=[0, _CAPTIONS, place, step]) for place in positions)
    return [np.random.Generator(stream).random() < share for stream in streams]


def mix(image: Tensor, noise: Tensor, times: Tensor) -> Tensor:
    """The point on the straight line from image (t = 0) to noise (t = 1); image, noise (B, ...), times (B,)."""
    return torch.lerp(image, noise, times.view(-1, *[1] * (image.dim() - 1)))


def loss_sum(guess: Tensor, image: Tensor, noise: Tensor) -> Tensor:
    """Sum over samples of the mean squared error against the velocity noise - image (krea2's plain MSE)."""
    return torch.nn.functional.mse_loss(guess, noise - image, reduction="sum") / guess[0].numel()
