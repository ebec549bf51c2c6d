"""Weights in memory that make pictures. No Ray here; one engine belongs to one replica."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from PIL import Image

from tidegate.errors import ModelRefusedError
from tidegate.train.export import export_id, load_export
from tidegate.train.pipeline import INDEX, Painter
from tidegate.train.recipe import Recipe
from tidegate.train.sample import sample


class _Paint(Protocol):
    """Images (B, H, W) or (B, H, W, C) uint8, one for each prompt and its seed."""

    def __call__(
        self,
        prompts: Sequence[str],
        seeds: Sequence[int],
        *,
        steps: int | None = None,
        guidance: float | None = None,
        negative: str = "",
        cancelled: Callable[[], bool] | None = None,
    ) -> np.ndarray: ...


@dataclass(frozen=True, slots=True)
class _Loaded:
    paint: _Paint
    recipe: Recipe
    export: str


class Engine:
    """Loads, verifies and warms an export before it is ready.

    Raises:
        ModelRefusedError: the export is incomplete or corrupt.
    """

    def __init__(self, folder: Path, threads: int) -> None:
        """`threads`: CPU threads that torch may use in this process."""
        torch.set_num_threads(threads)
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._loaded = self._load(folder)
        # One at a time: two batches on one device only slow each other down.
        self._working = threading.Lock()

    @property
    def export(self) -> str:
        """`export_id` of what serves now."""
        return self._loaded.export

    def generate(
        self,
        prompts: Sequence[str],
        seeds: Sequence[int],
        *,
        steps: int | None = None,
        guidance: float | None = None,
        negative: str = "",
        cancelled: Callable[[], bool] | None = None,
    ) -> tuple[tuple[bytes, ...], float]:
        """PNGs, one for each prompt, and the seconds of work. Blocks; `cancelled` is asked between steps.

        Raises:
            tidegate.train.sample.Cancelled: when `cancelled()` said so.
        """
        with self._working:
            loaded = self._loaded
            started_s = time.perf_counter()
            pixels = loaded.paint(
                prompts, seeds, steps=steps, guidance=guidance, negative=negative, cancelled=cancelled
            )
            return tuple(_png(image) for image in pixels), time.perf_counter() - started_s

    def swap(self, folder: Path) -> None:
        """Serve another export from the next request on. It is loaded, verified and warmed beside the one that
        serves meanwhile, so this needs room for both.

        Raises:
            ModelRefusedError: it is incomplete, corrupt, or makes another kind of picture. The old one keeps serving.
        """
        loaded = self._load(folder)
        now, then = self._loaded.recipe.image, loaded.recipe.image
        if now != then:
            raise ModelRefusedError(str(folder), f"makes {then!r}, this app serves {now!r}; deploy it as another app")
        self._loaded = loaded  # a request at work has its own hold on the old one and ends with it

    def _load(self, folder: Path) -> _Loaded:
        export = export_id(folder)
        model, recipe = load_export(folder)
        if recipe.text.encoder == "bytes":
            paint: _Paint = partial(sample, model.to(self._device), recipe)
        elif (folder / INDEX).exists():
            paint = Painter(folder, model, recipe, self._device)
        else:
            why = "has no text encoder and no autoencoder; export it with jobs/export_pipeline.py --parts"
            raise ModelRefusedError(str(folder), why)
        paint(["warm"], [0], steps=1)
        return _Loaded(paint, recipe, export)


def _png(pixels: np.ndarray) -> bytes:
    """(H, W) or (H, W, 3) uint8 as a PNG."""
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG", compress_level=1)
    return out.getvalue()
