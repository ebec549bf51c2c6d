"""How a job's fields are called by each kind of provider, and therefore what a provider can honour. Pure.

One table for both: what has no name there can't be asked for, so a request that asks for it is not eligible (and never
silently made without it).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tidegate.serve.work import ImageJob
from tidegate.spec.providers import AskedField, ProviderSpec

NAMES: Mapping[str, Mapping[AskedField, str]] = {
    # `size` is "WxH". PNG and base64 are the answer's form there; OpenAI's own models have neither seed nor steps.
    "openai": {"images": "n", "size": "size", "seed": "seed", "steps": "num_inference_steps"},
    # `size` is an object of width and height.
    "fal": {
        "images": "num_images",
        "size": "image_size",
        "seed": "seed",
        "steps": "num_inference_steps",
        "format": "output_format",
    },
    "replicate": {
        "images": "num_outputs",
        "width": "width",
        "height": "height",
        "seed": "seed",
        "steps": "num_inference_steps",
        "format": "output_format",
    },
}

EACH_ITS_SEED = frozenset({"openai"})
"""Kinds where image i of one request is made with `seed + i`, as it is here (SGLang, vLLM-Omni, another tidegate)."""


def names(spec: ProviderSpec) -> dict[AskedField, str]:
    """This provider's names; the operator's own ones win, and an empty one takes a field away."""
    return {field: name for field, name in {**NAMES[spec.kind], **spec.fields}.items() if name}


def wants(job: ImageJob) -> frozenset[str]:
    """What the client asked for by name, beyond what every provider can do."""
    asked = {
        "size": True,
        "images": job.images > 1,
        "seed": job.seed_asked,
        "seeds": job.seed_asked and job.images > 1,
        "steps": job.steps is not None,
        # No kind has a word for these by itself: many models know no negative prompt, and a hosted one ignores what it
        # does not know, so the operator names them.
        "guidance": job.guidance is not None,
        "negative_prompt": bool(job.negative_prompt),
    }
    return frozenset(field for field, is_asked in asked.items() if is_asked)


def honours(spec: ProviderSpec) -> frozenset[str]:
    """Which of these a provider can honour. `seeds`: several images, each by its own seed."""
    known = names(spec)
    able = {str(field) for field in known}
    if {"width", "height"} <= able or (spec.sizes is not None and len(spec.sizes) == 1):
        able.add("size")  # one fixed size needs no field
    if "seed" in able and spec.kind in EACH_ITS_SEED:
        able.add("seeds")
    return frozenset(able)


def body_of(job: ImageJob, spec: ProviderSpec) -> dict[str, Any]:
    """The job in the provider's words."""
    values: dict[AskedField, Any] = {
        "images": job.images,
        "size": {"width": job.size.width, "height": job.size.height} if spec.kind == "fal" else str(job.size),
        "width": job.size.width,
        "height": job.size.height,
        "format": "png",
    }
    if job.seed_asked:
        values["seed"] = job.seed
    if job.steps is not None:
        values["steps"] = job.steps
    if job.guidance is not None:
        # Krea 2's scale counts from the conditional prediction (0 = no guidance), the usual one from the unconditional.
        values["guidance"] = job.guidance + 1.0 if spec.guidance == "cfg" else job.guidance
    if job.negative_prompt:
        values["negative_prompt"] = job.negative_prompt
    known = names(spec)
    return {"prompt": job.prompt, **{known[field]: value for field, value in values.items() if field in known}}
