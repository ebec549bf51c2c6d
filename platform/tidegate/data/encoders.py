"""A diffusers pipeline's autoencoder and text encoder, run over the parts of a preparation."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from diffusers import Krea2Pipeline
from PIL import Image

from tidegate.data.states import LATENT, TEXT_STATES, Halves, LatentsSeen, StatesSeen, TextSeen, with_column
from tidegate.errors import DataError


class Encoders:
    """Those of Krea 2: their own pipeline encodes, so what is stored is what its sampler would compute."""

    def __init__(self, pipeline: str, *, latents: bool, text_length: int | None, batch: int, device: str) -> None:
        """
        Args:
            pipeline: a folder (or a name on the hub) as `DiffusionPipeline.save_pretrained` writes it.
            text_length: tokens that a caption has at most; None: captions are not encoded.
            batch: images or captions at a time.

        Raises:
            DataError: it isn't one.
        """
        # The encoders' own precision is bfloat16; a CPU computes faster, and the same, in float32.
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        left_out: dict[str, Any] = {"transformer": None}
        if not latents:
            left_out["vae"] = None
        if text_length is None:
            left_out |= {"text_encoder": None, "tokenizer": None}
        try:
            self._pipeline = Krea2Pipeline.from_pretrained(pipeline, dtype=dtype, **left_out).to(device)
        except (OSError, ValueError, TypeError) as error:
            raise DataError(f"{pipeline}: {error}\nhint: a folder of a whole Krea2Pipeline, or its name") from None
        self._latents, self._text_length, self._batch = latents, text_length, batch
        self._device, self._dtype = device, dtype

    def about(self) -> tuple[StatesSeen, Halves]:
        """What the columns mean, and the states (tokens, layers, width) of the empty caption (none of them where
        captions are not encoded)."""
        latents = text = None
        empty = np.empty((0, 0, 0), np.float16)
        if self._latents:
            vae = self._pipeline.vae.config
            latents = LatentsSeen(
                channels=vae.z_dim,
                factor=self._pipeline.vae_scale_factor,
                mean=tuple(vae.latents_mean),
                std=tuple(vae.latents_std),
            )
        if self._text_length is not None:
            [empty] = self.texts([""])
            text = TextSeen(layers=empty.shape[1], width=empty.shape[2], length=self._text_length)
        return StatesSeen(latents=latents, text=text), empty

    def encode(self, part: Any, *, keep_images: bool) -> Any:
        """A part with the columns that were asked for."""
        if self._latents:
            part = with_column(part, LATENT, self._latents_of(part))
        if self._text_length is not None:
            part = with_column(part, TEXT_STATES, self.texts(part["text"].to_pylist()))
        return part if keep_images or not self._latents else _without_images(part)

    @torch.inference_mode()
    def texts(self, captions: Sequence[str]) -> list[Halves]:
        """States (tokens, layers, width) of each caption's real tokens."""
        found: list[Halves] = []
        for start in range(0, len(captions), self._batch):
            some = list(captions[start : start + self._batch])
            states, mask = self._pipeline.encode_prompt(
                some, device=torch.device(self._device), max_sequence_length=self._text_length
            )
            found += [_halves(one[real]) for one, real in zip(states, mask, strict=True)]
        return found

    @torch.inference_mode()
    def _latents_of(self, part: Any) -> list[Halves]:
        """(channels, height, width) of each image. Rows of one size follow each other in a part."""
        raws = part["image"].combine_chunks().field("bytes").to_pylist()
        sizes = list(zip(part["width"].to_pylist(), part["height"].to_pylist(), strict=True))
        found: list[Halves] = []
        while len(found) < len(raws):
            start = len(found)
            same = [row for row in range(start, min(start + self._batch, len(raws))) if sizes[row] == sizes[start]]
            pixels = torch.stack([_pixels(raws[row]) for row in same]).to(self._device, self._dtype)
            # The autoencoder is a video's: one frame. Its mean, not a draw: the same latent whoever computes it.
            latents = self._pipeline.vae.encode(pixels[:, :, None]).latent_dist.mode()[:, :, 0]
            found += [_halves(latent) for latent in latents]
        return found


def _pixels(raw: bytes) -> torch.Tensor:
    """(3, H, W) in [-1, 1]."""
    with Image.open(io.BytesIO(raw)) as image:
        array = np.array(image.convert("RGB"))
    return torch.from_numpy(array).permute(2, 0, 1).float().div_(127.5).sub_(1)


def _halves(states: torch.Tensor) -> Halves:
    """
    Raises:
        DataError: a number is beyond float16.
    """
    found: Halves = states.to("cpu", torch.float16).numpy()
    if not np.isfinite(found).all():
        raise DataError("an encoder's output is beyond float16\nhint: is it the right pipeline?")
    return found


def _without_images(part: Any) -> Any:
    image = part["image"].combine_chunks()
    names = [pa.nulls(len(image), pa.binary()), image.field("path")]
    place = part.schema.get_field_index("image")
    return part.set_column(place, part.schema.field("image"), pa.StructArray.from_arrays(names, ["bytes", "path"]))
