"""What a step costs in floating point operations, and how fast that is. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.train.config import ImageSpec, ModelSpec, TextSpec

PEAK_TFLOPS = {
    "B200": 2250.0,
    "B100": 1750.0,
    "GH200": 989.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "A10": 125.0,
}
"""Dense bfloat16 TFLOP/s by what a device's name contains, the longer names first (NVIDIA's data sheets)."""


@dataclass(frozen=True, slots=True)
class Pace:
    images_per_s: float
    """Of the whole run."""
    tflops: float
    """TFLOP/s of one device."""
    mfu: float | None
    """Model FLOPs utilisation: `tflops` over what the device could do; None where that is not known."""


def pace(*, image_flops: float, images: int, seconds: float, devices: int, peak_tflops: float | None) -> Pace:
    """Of a step of `images` that took `seconds` on `devices`.

    MFU = images · image_flops / (seconds · devices · peak). What is computed again for activation checkpointing is no
    work; the wait for data, for other ranks and for a checkpoint's copy is time. The peak is bfloat16's also where
    8-bit products are used.
    """
    tflops = images * image_flops / seconds / devices / 1e12
    return Pace(images / seconds, tflops, tflops / peak_tflops if peak_tflops else None)


def training_flops(model: ModelSpec, image: ImageSpec, text: TextSpec) -> float:
    """Of one image in one training step: three forward passes, as the backward pass has two products (one for the
    input, one for the weight) where the forward pass has one."""
    return 3.0 * forward_flops(model, image, text)


def forward_flops(model: ModelSpec, image: ImageSpec, text: TextSpec) -> float:
    """Of one image in one forward pass of `Krea2Transformer2DModel`: its matrix products, a multiply-add being two.

    A linear layer of m × n on t tokens: 2·t·m·n. Attention over s tokens of width d: 4·s²·d (queries by keys, weights
    by values; masked places count, they are computed). Norms, activations and rotations are left out.
    """
    width = model.attention_head_dim * model.num_attention_heads
    kept = text.length
    joint = kept + image.tokens
    text_heads = model.text_num_attention_heads
    text_key_width = model.text_hidden_dim // text_heads * model.text_num_key_value_heads

    def text_block(tokens: int, span: int) -> int:
        block = _block(model.text_hidden_dim, text_key_width, model.text_intermediate_size)
        return 2 * tokens * block + 4 * tokens * span * model.text_hidden_dim

    time = model.timestep_embed_dim * width + width * width + width * 6 * width
    ends = 2 * image.tokens * model.in_channels * width
    text_in = kept * (model.text_hidden_dim * width + width * width + model.num_text_layers * model.text_hidden_dim)
    layerwise = text_block(kept * model.num_text_layers, model.num_text_layers) * model.num_layerwise_text_blocks
    refiner = text_block(kept, kept) * model.num_refiner_text_blocks
    key_width = model.attention_head_dim * model.num_key_value_heads
    block = 2 * joint * _block(width, key_width, model.intermediate_size) + 4 * joint * joint * width
    return float(2 * (time + ends + text_in) + layerwise + refiner + model.num_layers * block)


def peak_tflops_of(device_name: str) -> float | None:
    """By the table, None for a device it doesn't know."""
    return next((peak for name, peak in PEAK_TFLOPS.items() if name in device_name), None)


def _block(width: int, key_width: int, hidden: int) -> int:
    """Weights of a block's products: query, gate, output; key, value; three of the feed-forward."""
    return 3 * width * width + 2 * width * key_width + 3 * width * hidden
