"""From noise to images: Euler steps along the learnt flow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from tidegate.data.text import ByteText
from tidegate.errors import TidegateError
from tidegate.train.model import positions, to_pixels, to_tokens, velocity
from tidegate.train.objective import shift_of
from tidegate.train.recipe import Recipe


class Cancelled(TidegateError):
    """Sampling was told to stop; nothing of the batch is returned."""

    def __init__(self, steps_done: int, steps: int) -> None:
        super().__init__(steps_done, steps)
        self.steps_done, self.steps = steps_done, steps

    def __str__(self) -> str:
        return f"sampling cancelled after {self.steps_done} of {self.steps} steps"


def drawn(
    model: nn.Module,
    recipe: Recipe,
    prompts: Sequence[str],
    seeds: Sequence[int],
    *,
    steps: int | None = None,
    guidance: float | None = None,
    negative: str = "",
    on_step: Callable[[int, int], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> np.ndarray:
    """Images for `prompts`, uint8 of shape (B, H, W) where the recipe has one channel, else (B, H, W, C).

    Image i starts from its own generator, seeded by `seeds[i]` (as Krea 2's own code does), so it is the same image
    alone or in a batch. `steps` and `guidance`: none = the recipe's; with guidance pictures are led away from what
    `negative` says. `on_step(done, steps)` is called after each step; `cancelled()` is asked before each.

    Gradients are the caller's affair: a network that is split over ranks bears no inference mode.

    Raises:
        Cancelled: when `cancelled()` said so.
        ValueError: prompts and seeds differ in number, or there are none.
    """
    if len(prompts) != len(seeds) or not prompts:
        raise ValueError(f"needs one seed for each prompt and at least one, got {len(prompts)} and {len(seeds)}")
    steps = recipe.steps if steps is None else steps
    guidance = recipe.guidance if guidance is None else guidance
    device = next(model.parameters()).device
    states, mask = (part.to(device) for part in _text(recipe).encode(prompts))
    plain = tuple(part.to(device) for part in _text(recipe).encode([negative] * len(prompts))) if guidance else None
    places = positions(recipe.text.length, recipe.image).to(device)
    tokens = to_tokens(torch.stack([_noise(recipe, seed) for seed in seeds]), recipe.image.patch).to(device)
    times = grid(steps, shift_of(recipe.shift, recipe.image.tokens))
    for done, (now, then) in enumerate(pairwise(times)):
        if cancelled is not None and cancelled():
            raise Cancelled(done, steps)
        at = torch.full((len(prompts),), now, device=device)
        guess = velocity(model, tokens, states, mask, at, places)
        if plain is not None:
            without = velocity(model, tokens, plain[0], plain[1], at, places)
            guess = guess + guidance * (guess - without)
        tokens = tokens + (then - now) * guess
        if on_step is not None:
            on_step(done + 1, steps)
    return _to_bytes(to_pixels(tokens, recipe.image))


sample = torch.inference_mode()(drawn)
"""As `drawn`, for a network that one process holds."""


def grid(steps: int, shift: float) -> list[float]:
    """`steps + 1` times from 1 (noise) to 0 (image), shifted by t' = s·t / (1 + (s-1)·t) (Krea 2's sampler)."""
    even = (1 - step / steps for step in range(steps + 1))
    return [shift * time / (1 + (shift - 1) * time) for time in even]


def _noise(recipe: Recipe, seed: int) -> Tensor:
    # Drawn on the CPU, so that a seed means the same image on every device.
    shape = (recipe.image.channels, recipe.image.height, recipe.image.width)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _to_bytes(pixels: Tensor) -> np.ndarray:
    image = ((pixels.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).cpu().numpy()
    return image[:, 0] if image.shape[1] == 1 else image.transpose(0, 2, 3, 1)


def _text(recipe: Recipe) -> ByteText:
    key = (recipe.text.length, recipe.text.width, recipe.text.seed)
    if key not in _TEXT:
        _TEXT[key] = ByteText(*key)
    return _TEXT[key]


_TEXT: dict[tuple[int, int, int], ByteText] = {}
