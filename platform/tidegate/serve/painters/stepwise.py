"""Krea 2's transformer step by step, whatever its texts and pictures come from: our own recipe, or a whole pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from tidegate.data.text import ByteText
from tidegate.serve.embeddings import Embeddings
from tidegate.serve.painters.base import Drawing, Wish
from tidegate.serve.work import Size
from tidegate.train.model import positions, to_pixels, to_tokens, velocity
from tidegate.train.objective import shift_of
from tidegate.train.recipe import Recipe
from tidegate.train.sample import grid


class Parts(Protocol):
    """What stands around the network. Tensors are on the network's device, of one picture, without a batch axis."""

    steps: int
    """The model's own number of them."""
    guidance: float

    def encode(self, prompt: str) -> tuple[Tensor, Tensor]:
        """States (L, …) and mask (L,)."""
        ...

    def noise(self, seed: int, size: Size) -> Tensor:
        """(N, C), drawn on the CPU, so that a seed means the same picture on every device."""
        ...

    def times(self, steps: int, size: Size) -> tuple[Tensor, Tensor]:
        """Two of (steps,), float32 on the CPU: when each step is made, and how far it goes."""
        ...

    def places(self, size: Size) -> Tensor:
        """(L + N, 3): the rotary coordinates."""
        ...

    def decode(self, tokens: Tensor, size: Size) -> np.ndarray:
        """uint8 (H, W) or (H, W, 3) from (N, C)."""
        ...


class StepPainter:
    """`Stepped` over a network and its parts."""

    def __init__(self, network: nn.Module, parts: Parts, sizes: tuple[Size, ...], embeddings: Embeddings) -> None:
        self.sizes = sizes
        self.embeddings = embeddings
        self._network, self._parts = network, parts
        self._places: dict[Size, Tensor] = {}

    @torch.inference_mode()
    def begin(self, wish: Wish) -> Drawing:
        guidance = self._parts.guidance if wish.guidance is None else wish.guidance
        states, mask = self._encoded(wish.prompt)
        tokens = self._parts.noise(wish.seed, wish.size)
        at, leap = self._parts.times(self._parts.steps if wish.steps is None else wish.steps, wish.size)
        return Drawing(
            size=wish.size,
            tokens=tokens,
            states=states,
            mask=mask,
            plain=self._encoded(wish.negative) if guidance else None,
            guidance=guidance,
            at=at.to(tokens.device),
            leap=leap.to(tokens.device),
        )

    @torch.inference_mode()
    def step(self, drawings: Sequence[Drawing], bucket: int) -> None:
        # A batch has a bucket's size, so that a compiled network meets no new shape; what fills it up is thrown away.
        rows = [*drawings, *[drawings[-1]] * (bucket - len(drawings))]
        size = drawings[0].size
        if size not in self._places:
            self._places[size] = self._parts.places(size)
        tokens, places = torch.stack([row.tokens for row in rows]), self._places[size]
        at = torch.stack([row.at[row.done] for row in rows])
        states, mask = torch.stack([row.states for row in rows]), torch.stack([row.mask for row in rows])
        guess = velocity(self._network, tokens, states, mask, at.to(tokens.dtype), places)
        plain = [row.plain for row in rows if row.plain is not None]
        if plain:
            states, mask = torch.stack([one[0] for one in plain]), torch.stack([one[1] for one in plain])
            without = velocity(self._network, tokens, states, mask, at.to(tokens.dtype), places)
            scale = _column([row.guidance for row in rows], guess)
            guess = guess + scale * (guess - without)
        # As diffusers' scheduler: in float32, then back.
        leap = torch.stack([row.leap[row.done] for row in rows])[:, None, None]
        ahead = (tokens.float() + (leap * guess.float()).to(guess.dtype)).to(guess.dtype)
        clean = tokens - at[:, None, None].to(tokens.dtype) * guess
        for row, drawing in enumerate(drawings):
            drawing.tokens, drawing.clean = ahead[row], clean[row]
            drawing.done += 1

    @torch.inference_mode()
    def picture(self, drawing: Drawing, *, unfinished: bool = False) -> np.ndarray:
        tokens = drawing.clean if unfinished and drawing.clean is not None else drawing.tokens
        return self._parts.decode(tokens, drawing.size)

    def _encoded(self, prompt: str) -> tuple[Tensor, Tensor]:
        states, mask = self.embeddings.get(prompt, lambda: self._parts.encode(prompt))
        return states, mask


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None, None]


class OwnParts:
    """Of a run whose texts are bytes and whose network makes pixels; as `tidegate.train.sample`."""

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self.steps, self.guidance = recipe.steps, recipe.guidance
        self._recipe, self._device = recipe, device
        self._text = ByteText(recipe.text.length, recipe.text.width, recipe.text.seed)

    def encode(self, prompt: str) -> tuple[Tensor, Tensor]:
        states, mask = self._text.encode([prompt])
        return states[0].to(self._device), mask[0].to(self._device)

    def noise(self, seed: int, size: Size) -> Tensor:
        image = self._recipe.image
        shape = (1, image.channels, image.height, image.width)
        return to_tokens(torch.randn(shape, generator=torch.Generator().manual_seed(seed)), image.patch)[0].to(
            self._device
        )

    def times(self, steps: int, size: Size) -> tuple[Tensor, Tensor]:
        times = grid(steps, shift_of(self._recipe.shift, self._recipe.image.tokens))
        return torch.tensor(times[:-1]), torch.tensor([then - now for now, then in pairwise(times)])

    def places(self, size: Size) -> Tensor:
        return positions(self._recipe.text.length, self._recipe.image).to(self._device)

    def decode(self, tokens: Tensor, size: Size) -> np.ndarray:
        pixels = to_pixels(tokens[None], self._recipe.image)
        image: np.ndarray = ((pixels.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).cpu().numpy()[0]
        return image[0] if image.shape[0] == 1 else image.transpose(1, 2, 0)


class KreaParts:
    """Of a whole `Krea2Pipeline`: what its own `__call__` does, a picture at a time (diffusers 0.42)."""

    def __init__(self, pipeline: Any, text_length: int, steps: int, guidance: float) -> None:
        self.steps, self.guidance = steps, guidance
        self._pipeline, self._text_length = pipeline, text_length
        self._device: torch.device = pipeline._execution_device

    def encode(self, prompt: str) -> tuple[Tensor, Tensor]:
        states, mask = self._pipeline.encode_prompt(
            [prompt], device=self._device, max_sequence_length=self._text_length
        )
        return states[0], mask[0]

    def noise(self, seed: int, size: Size) -> Tensor:
        pipeline = self._pipeline
        channels = pipeline.transformer.config.in_channels // pipeline.patch_size**2
        generator = torch.Generator().manual_seed(seed)
        noise: Tensor = pipeline.prepare_latents(
            1, channels, size.height, size.width, pipeline.transformer.dtype, self._device, generator
        )
        return noise[0]

    def times(self, steps: int, size: Size) -> tuple[Tensor, Tensor]:
        from diffusers.pipelines.krea2.pipeline_krea2 import calculate_shift

        scheduler = self._pipeline.scheduler
        rows, columns = self._grid(size)
        names = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
        known = {name: scheduler.config.get(name) for name in names}
        shift = calculate_shift(rows * columns, *(known[name] or default for name, default in _SHIFT.items()))
        scheduler.set_timesteps(
            sigmas=np.linspace(1.0, 1 / steps, steps), mu=1.15 if self._pipeline.config.is_distilled else shift
        )
        sigmas = scheduler.sigmas.float().cpu()
        at = scheduler.timesteps.float().cpu() / scheduler.config.num_train_timesteps
        return at, sigmas[1:] - sigmas[:-1]

    def places(self, size: Size) -> Tensor:
        rows, columns = self._grid(size)
        places: Tensor = self._pipeline.prepare_position_ids(self._text_length, rows, columns, self._device)
        return places

    def decode(self, tokens: Tensor, size: Size) -> np.ndarray:
        pipeline, vae = self._pipeline, self._pipeline.vae
        latents = pipeline._unpack_latents(tokens[None], size.height, size.width).to(vae.dtype)
        mean, scale = (
            torch.tensor(values).view(1, vae.config.z_dim, 1, 1, 1).to(latents.device, latents.dtype)
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        # 1 / (1 / std), rounded twice as the pipeline does: the same bits.
        image = vae.decode(latents / (1.0 / scale) + mean, return_dict=False)[0][:, :, 0]
        pixels: np.ndarray = pipeline.image_processor.postprocess(image, output_type="np")[0]
        return (pixels * 255).round().astype(np.uint8)

    def _grid(self, size: Size) -> tuple[int, int]:
        side = self._pipeline.vae_scale_factor * self._pipeline.patch_size
        return size.height // side, size.width // side


_SHIFT = {"base_image_seq_len": 256, "max_image_seq_len": 6400, "base_shift": 0.5, "max_shift": 1.15}
"""What the pipeline takes where its scheduler's config says nothing."""
