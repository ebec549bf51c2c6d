"""Any other pipeline that diffusers can load: asked for whole pictures, by the arguments that its `__call__` has."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tidegate.serve.embeddings import Embeddings
from tidegate.serve.painters.base import After, Wish
from tidegate.serve.work import Size


class PipelinePainter:
    """`Whole` over a diffusers pipeline. Its texts are kept by a cache around its `encode_prompt`, where it has one."""

    def __init__(self, pipeline: Any, sizes: tuple[Size, ...], embeddings: Embeddings) -> None:
        self.sizes = sizes
        self.embeddings = embeddings
        self._pipeline = pipeline
        self._takes = inspect.signature(pipeline.__call__).parameters
        if hasattr(pipeline, "encode_prompt"):
            pipeline.encode_prompt = _remembered(pipeline.encode_prompt, embeddings)

    def paint(self, wishes: Sequence[Wish], after: After) -> np.ndarray:
        first = wishes[0]
        asked = {
            "prompt": [wish.prompt for wish in wishes],
            "width": first.size.width,
            "height": first.size.height,
            "num_inference_steps": first.steps,
            "guidance_scale": first.guidance,
            "negative_prompt": [wish.negative for wish in wishes] if first.negative else None,
        }
        own = self._takes["num_inference_steps"].default if "num_inference_steps" in self._takes else 0
        steps = int(first.steps or own)
        after(0, steps, None)
        call = {name: value for name, value in asked.items() if value is not None and name in self._takes}
        if "callback_on_step_end" in self._takes:
            call["callback_on_step_end"] = partial(self._stepped, steps, after)
        # Drawn on the CPU, so that a seed means the same picture on every device.
        generators = [torch.Generator().manual_seed(wish.seed) for wish in wishes]
        made = self._pipeline(**call, generator=generators, output_type="np")
        return _bytes(np.asarray(made.images))

    def _stepped(
        self, steps: int, after: After, _: object, step: int, time: object, values: dict[str, Any]
    ) -> dict[str, Any]:
        if step + 1 < steps:
            after(step + 1, steps, self._unfinished(values.get("latents")))
        return values

    def _unfinished(self, latents: object) -> Callable[[], np.ndarray] | None:
        # Latents in their plain shape; packed ones only their own pipeline can unpack.
        vae = getattr(self._pipeline, "vae", None)
        if isinstance(latents, Tensor) and latents.ndim == 4 and "scaling_factor" in getattr(vae, "config", ()):
            return partial(self._decoded, latents)
        return None

    @torch.inference_mode()
    def _decoded(self, latents: Tensor) -> np.ndarray:
        vae = self._pipeline.vae
        shift = vae.config.get("shift_factor") or 0.0
        image = vae.decode(latents.to(vae.dtype) / vae.config.scaling_factor + shift, return_dict=False)[0]
        return _bytes(self._pipeline.image_processor.postprocess(image, output_type="np"))


def _bytes(pixels: np.ndarray) -> np.ndarray:
    return (pixels * 255).round().astype(np.uint8)


def _remembered(encode: Any, embeddings: Embeddings) -> Any:
    """`encode_prompt`, asked once for the same arguments. A call that is given tensors is not kept."""

    def encoded(*args: Any, **named: Any) -> Any:
        if any(isinstance(value, Tensor) for value in (*args, *named.values())):
            return encode(*args, **named)
        return embeddings.get(repr((args, sorted(named.items()))), partial(encode, *args, **named))

    return encoded
