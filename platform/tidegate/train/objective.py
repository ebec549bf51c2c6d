"""Rectified flow as tensor functions. What a sample sees depends on (seed, step, its place in the global batch) alone,
so any number of ranks computes the same thing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tidegate.train.config import ObjectiveSpec


def draw(
    seed: int, step: int, positions: Sequence[int], shape: Sequence[int], spec: ObjectiveSpec
) -> tuple[Tensor, Tensor]:
    """Noise (B, *shape) and times (B,) for the samples at `positions` of the global batch of `step`, float32.

    Philox is a counter-based generator: the counter's upper half holds (position, step), so each sample has a stream of
    its own that is found without drawing the others.
    """
    size = int(np.prod(shape))
    drawn = np.empty((len(positions), size + 1), dtype=np.float32)
    for row, position in zip(drawn, positions, strict=True):
        stream = np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, position, step]))
        stream.standard_normal(dtype=np.float32, out=row)
    both = torch.from_numpy(drawn)
    return both[:, 1:].reshape(-1, *shape), times_of(both[:, 0], spec)


def times_of(normal: Tensor, spec: ObjectiveSpec) -> Tensor:
    """Standard normal numbers -> logit-normal times in (0, 1), shifted by t' = s·t / (1 + (s-1)·t); 1 is pure noise."""
    times = torch.sigmoid(normal * spec.timestep_std + spec.timestep_mean)
    return spec.shift * times / (1 + (spec.shift - 1) * times)


def mix(image: Tensor, noise: Tensor, times: Tensor) -> Tensor:
    """The point on the straight line from image (t = 0) to noise (t = 1); image, noise (B, ...), times (B,)."""
    return torch.lerp(image, noise, times.view(-1, *[1] * (image.dim() - 1)))


def loss_sum(guess: Tensor, image: Tensor, noise: Tensor) -> Tensor:
    """Sum over samples of the mean squared error against the velocity noise - image (krea2's plain MSE)."""
    return torch.nn.functional.mse_loss(guess, noise - image, reduction="sum") / guess[0].numel()
