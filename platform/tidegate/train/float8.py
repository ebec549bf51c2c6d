"""Matrix products of 8-bit floats, for the linear layers of a block.

Forward both factors are e4m3; backward the incoming gradient is e5m2, which has the range that gradients need. Scales
are drawn anew from each tensor (dynamic scaling): its largest magnitude lands on the type's largest number. Sums are
kept in the output's type. A layer whose sizes are no multiples of 16 stays as it is: the hardware takes no others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tidegate.errors import ConfigError
from tidegate.train.config import Float8

_STEP = 16
_FIRST_CAPABILITY = (8, 9)
"""Ada and Hopper are the first GPUs with such products."""


def to_float8(block: nn.Module, mode: Float8) -> None:
    """Have the linear layers in `block` multiply in 8 bits. Their weights and names stay as they are."""
    if mode == "none":
        return
    for layer in block.modules():
        if isinstance(layer, nn.Linear) and not layer.in_features % _STEP and not layer.out_features % _STEP:
            layer.forward = _Forward(layer, by_row=mode == "rowwise")  # type: ignore[method-assign, assignment]


def check(mode: Float8, device: torch.device) -> None:
    """
    Raises:
        ConfigError: the device has no 8-bit products.
    """
    if mode == "none":
        return
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FIRST_CAPABILITY:
        return
    what = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    raise ConfigError(
        f"float8: {what} has no 8-bit matrix products; they need an NVIDIA GPU of compute capability 8.9 or newer\n"
        "hint: set float8 to `none`, in the run and in its stages"
    )


class _Forward:
    """In place of a layer's `forward`."""

    def __init__(self, layer: nn.Linear, *, by_row: bool) -> None:
        self._layer, self._by_row = layer, by_row

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if rows.shape[0] % _STEP:  # the backward product sums over rows
            return nn.functional.linear(x, self._layer.weight, self._layer.bias)
        out: Tensor = Product.apply(rows, self._layer.weight, self._by_row)  # type: ignore[no-untyped-call]
        if self._layer.bias is not None:
            out = out + self._layer.bias
        return out.reshape(*x.shape[:-1], -1)


class Product(torch.autograd.Function):
    """x (M, K) · weight (N, K)ᵀ -> (M, N)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, by_row: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.by_row = by_row
        return multiplied(x, weight, by_row=by_row)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        (out,) = gradients
        needs_x, needs_weight, _ = ctx.needs_input_grad
        to_x = multiplied(out, weight.t(), left=torch.float8_e5m2, by_row=ctx.by_row) if needs_x else None
        to_weight = None
        if needs_weight:
            to_weight = multiplied(out.t(), x.t(), left=torch.float8_e5m2, by_row=ctx.by_row)
        return to_x, to_weight, None


def multiplied(a: Tensor, b: Tensor, *, by_row: bool, left: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """a (M, K) · b (N, K)ᵀ -> (M, N) of `a`'s type, factors rounded to 8 bits; one scale for each factor, or for each
    of its rows."""
    a8, a_scale = rounded(a, left, by_row=by_row)
    b8, b_scale = rounded(b, torch.float8_e4m3fn, by_row=by_row)
    scales = (a_scale, b_scale.t()) if by_row else (a_scale, b_scale)
    # Scales by row want bfloat16 out of the hardware.
    out = torch._scaled_mm(a8, b8.t(), *scales, out_dtype=torch.bfloat16 if by_row else a.dtype, use_fast_accum=False)
    return out.to(a.dtype)


def rounded(value: Tensor, kind: torch.dtype, *, by_row: bool) -> tuple[Tensor, Tensor]:
    """(value / scale as `kind`, scale float32): scale is (rows, 1) or a scalar."""
    size = value.abs().float()
    largest = size.amax(dim=1, keepdim=True) if by_row else size.amax()
    limit = torch.finfo(kind).max
    scale = largest.clamp(min=1e-12) / limit
    return (value.float() / scale).clamp(-limit, limit).to(kind).contiguous(), scale
