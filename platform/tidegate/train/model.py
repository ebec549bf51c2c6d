"""The network: diffusers' Krea 2 transformer, and how images and tokens map onto each other."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.transformers.transformer_krea2 import Krea2Transformer2DModel
from torch import Tensor, nn

from tidegate.train.config import ImageSpec, ModelSpec


def build(spec: ModelSpec) -> Krea2Transformer2DModel:
    """A network on the current default device, its weights drawn from torch's global generator."""
    return Krea2Transformer2DModel(**arguments(spec))


def seeded(spec: ModelSpec, seed: int) -> Krea2Transformer2DModel:
    """A network with fresh weights that depend on `seed` alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build(spec)


def arguments(spec: ModelSpec) -> dict[str, Any]:
    return spec.model_dump(mode="python")


def positions(text_length: int, image: ImageSpec) -> Tensor:
    """(text_length + tokens, 3) rotary coordinates (time, row, column); text stands at the origin."""
    rows, columns = image.height // image.patch, image.width // image.patch
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
    """The inverse of `to_tokens`: (B, N, C · patch²) -> (B, C, H, W)."""
    rows, columns, patch = image.height // image.patch, image.width // image.patch, image.patch
    squares = tokens.reshape(tokens.shape[0], rows, columns, image.channels, patch, patch)
    return squares.permute(0, 3, 1, 4, 2, 5).reshape(tokens.shape[0], image.channels, image.height, image.width)


def velocity(network: nn.Module, tokens: Tensor, states: Tensor, mask: Tensor, times: Tensor, places: Tensor) -> Tensor:
    """The network's guess of noise - image for (B, N, C) tokens at `times` (B,), 1 = pure noise."""
    out: Tensor = network(tokens, states, times, places, mask, return_dict=False)[0]
    return out
