"""The network: diffusers' Krea 2 transformer, and how images and tokens map onto each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers.models.transformers.transformer_krea2 import Krea2Transformer2DModel
from torch import Tensor, nn

from tidegate.train.config import ImageSpec, ModelSpec


def build(spec: ModelSpec) -> Krea2Transformer2DModel:
    """A network on the current default device, its weights drawn from torch's global generator."""
    return Krea2Transformer2DModel(**arguments(spec))


def seeded(
    spec: ModelSpec, seed: int, each: Callable[[nn.Module], object] = lambda part: None
) -> Krea2Transformer2DModel:
    """A network with fresh weights that depend on `seed` alone.

    It comes to life a part at a time, blocks one by one, and each is handed to `each` at once: split there, the whole
    network never lies in one rank's memory. Parts keep the order in which diffusers makes them, so the weights are
    those of `build` under the same seed.
    """
    with torch.device("meta"):
        network = build(spec)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for child in network.children():
            for part in child if isinstance(child, nn.ModuleList) else (child,):
                _draw(part)
                each(part)
    return network


def _draw(part: nn.Module) -> None:
    for module in part.modules():
        module.to_empty(device="cpu", recurse=False)
        if isinstance(module, nn.Linear):
            module.reset_parameters()
        else:
            for parameter in module.parameters(recurse=False):
                nn.init.zeros_(parameter)  # the norms' and the modulation tables'


def arguments(spec: ModelSpec) -> dict[str, Any]:
    return spec.model_dump(mode="python")


def positions(text_length: int, image: ImageSpec) -> Tensor:
    """(text_length + tokens, 3) rotary coordinates (time, row, column); text stands at the origin."""
    rows, columns = image.rows, image.columns
    places = torch.zeros(text_length + rows * columns, 3)
    places[text_length:, 1] = torch.arange(rows).repeat_interleave(columns)
    places[text_length:, 2] = torch.arange(columns).repeat(rows)
    return places


def to_tokens(pixels: Tensor, patch: int) -> Tensor:
    """(B, C, H, W) -> (B, H/patch · W/patch, C · patch²), channel-major inside a token as Krea 2 does."""
    batch, channels, height, width = pixels.shape
    squares = pixels.reshape(batch, channels, height // patch, patch, width // patch, patch)
    return squares.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * patch * patch)


def to_pixels(tokens: Tensor, image: ImageSpec) -> Tensor:
    """The inverse of `to_tokens`: (B, N, C · patch²) -> (B, C, H, W), of latents (B, C, H/factor, W/factor)."""
    rows, columns, patch = image.rows, image.columns, image.patch
    squares = tokens.reshape(tokens.shape[0], rows, columns, image.channels, patch, patch)
    return squares.permute(0, 3, 1, 4, 2, 5).reshape(tokens.shape[0], image.channels, rows * patch, columns * patch)


def velocity(network: nn.Module, tokens: Tensor, states: Tensor, mask: Tensor, times: Tensor, places: Tensor) -> Tensor:
    """The network's guess of noise - image for (B, N, C) tokens at `times` (B,), 1 = pure noise."""
    out: Tensor = network(tokens, states, times, places, mask, return_dict=False)[0]
    return out
