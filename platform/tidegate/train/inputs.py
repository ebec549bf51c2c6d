"""From a batch of the loader to what the network takes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tidegate.data.buckets import Size
from tidegate.data.dataset import Dataset
from tidegate.data.loader import Batch, padded
from tidegate.data.text import ByteText
from tidegate.errors import DataError
from tidegate.train.config import ImageSpec, RunConfig, TextSpec
from tidegate.train.model import positions, to_tokens
from tidegate.train.objective import without_caption
from tidegate.train.stages import Stage


@dataclass(frozen=True, slots=True)
class Given:
    """For the samples of one batch, on the CPU but for `places`."""

    image: Tensor
    """(B, tokens, C · patch²) float32."""
    states: Tensor
    """(B, length, layers, width)."""
    mask: Tensor
    """(B, length) bool: what is no padding."""
    places: Tensor
    """(length + tokens, 3) rotary coordinates, on the device."""


class Inputs:
    """Of one stage."""

    def __init__(self, config: RunConfig, stage: Stage, data: Dataset, device: torch.device) -> None:
        self._config, self._image, self._begins, self._device = config, stage.image, stage.begins, device
        self._places: dict[Size, Tensor] = {}
        text = config.text
        self._bytes = ByteText(text.length, text.width, text.seed) if text.encoder == "bytes" else None
        self._no_caption = _no_caption(text, data) if text.encoder == "prepared" else None
        self._latents = data.latents

    def of(self, batch: Batch) -> Given:
        states, mask = self._text(batch)
        return Given(self._tokens(batch), states, mask, self._places_of(batch.size))

    def _tokens(self, batch: Batch) -> Tensor:
        if batch.pixels is not None:
            return to_tokens(batch.pixels, self._image.patch)
        assert batch.latents is not None
        assert self._latents is not None
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (self._latents.mean, self._latents.std))
        return to_tokens((batch.latents.float() - mean) / std, self._image.patch)

    def _text(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """With the captions that the objective drops left out."""
        share, step = self._config.objective.captions_dropped, self._begins + batch.step
        without = without_caption(self._config.seed, step, batch.positions, share)
        if self._bytes is not None:
            return self._bytes.encode(["" if no else text for no, text in zip(without, batch.captions, strict=True)])
        assert batch.text_states is not None
        assert batch.text_mask is not None
        assert self._no_caption is not None
        dropped = torch.tensor(without)
        states, mask = self._no_caption
        return (
            torch.where(dropped[:, None, None, None], states, batch.text_states).float(),
            torch.where(dropped[:, None], mask, batch.text_mask),
        )

    def _places_of(self, size: Size) -> Tensor:
        if size not in self._places:
            image = self._image.model_copy(update={"width": size.width, "height": size.height})
            self._places[size] = positions(self._config.text.length, image).to(self._device)
        return self._places[size]


def dataset_of(config: RunConfig, stage: Stage, data_dir: str | Path) -> Dataset:
    """
    Raises:
        DataError: there is none, or what it holds is not what the run's config says.
    """
    image, text = stage.image, config.text
    data = Dataset(
        f"{data_dir}/{stage.data}" if stage.data else data_dir,
        width=image.width,
        height=image.height,
        channels=image.channels,
        latents=image.latent_factor > 1,
        text_length=text.length if text.encoder == "prepared" else None,
        buckets=image.buckets,
    )
    wrong = [size for size in data.index.buckets if size.width % image.side or size.height % image.side]
    if wrong:
        raise DataError(
            f"{data.folder}: sizes must be multiples of {image.side}, has {wrong[0]}\nhint: prepare with --multiple "
            f"{image.side}"
        )
    _check_states(data, image, text)
    return data


def _check_states(data: Dataset, image: ImageSpec, text: TextSpec) -> None:
    pairs = []
    if data.latents is not None:
        pairs += [("image.latent_factor", image.latent_factor, data.latents.factor)]
    if data.text is not None:
        pairs += [("text.layers", text.layers, data.text.layers), ("text.width", text.width, data.text.width)]
        pairs += [("text.length", text.length, data.text.length)]
    for field, says, there in pairs:
        if says != there:
            raise DataError(f"{data.folder}: {field} is {says}, the data set has {there}\nhint: set {field}: {there}")


def _no_caption(text: TextSpec, data: Dataset) -> tuple[Tensor, Tensor]:
    return padded([data.empty_caption()], text.length)
