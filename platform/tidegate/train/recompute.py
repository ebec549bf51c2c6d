"""Activation checkpointing of one block: keep less, compute it again in the backward pass."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tidegate.train.config import Recompute

_PRODUCTS = frozenset({torch.ops.aten.mm.default, torch.ops.aten._scaled_mm.default})
_KEPT = frozenset(
    {
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
        torch.ops._c10d_functional.all_reduce.default,
    }
)
"""Dear to compute again: attention, whose cost grows with the square of the tokens, and sums over ranks."""


def compute_again(block: nn.Module, mode: Recompute) -> None:
    """Have `block` keep what `mode` says. Its names and hooks stay as they are.

    `selective` keeps attention and every second matrix product (torchtitan's policy "op"): about half the memory of
    keeping all for a few percent of the time.
    """
    if mode == "none":
        return
    plain = block.forward
    more: dict[str, Any] = {"context_fn": _selective} if mode == "selective" else {}

    def forward(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(plain, *args, use_reentrant=False, **more, **kwargs)

    block.forward = forward


def _selective() -> Any:
    seen: Counter[bool] = Counter()

    def policy(context: Any, operation: Any, *args: object, **kwargs: object) -> CheckpointPolicy:
        if operation in _PRODUCTS:
            seen[context.is_recompute] += 1
            return _keep(seen[context.is_recompute] % 2 == 1)
        return _keep(operation in _KEPT)

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]


def _keep(kept: bool) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
