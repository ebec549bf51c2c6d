"""AdamW over a rank's shards, and its learning rate."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tidegate.train.config import OptimizerSpec
from tidegate.train.parallel import Shard


def decays(name: str) -> bool:
    """Whether weight decay applies to a parameter: to all but biases and modulation tables. Norm weights decay too, as
    they do in Krea 2 (they are centred on zero)."""
    return not (name.endswith((".bias", "scale_shift_table")))


def learning_rate(step: int, steps: int, spec: OptimizerSpec) -> float:
    """Of `step` (from 0) in a run of `steps`: linear warm-up, flat, linear decay to almost 0 (warmup–stable–decay)."""
    rise = (step + 1) / spec.warmup_steps if spec.warmup_steps else 1.0
    fall = (steps - step) / (spec.decay_steps + 1) if spec.decay_steps else 1.0
    return spec.lr * max(0.0, min(1.0, rise, fall))


def adamw(shards: Sequence[Shard], spec: OptimizerSpec) -> torch.optim.AdamW:
    """AdamW whose parameters are the shards' local tensors: one fused call, no sharded-tensor dispatch per parameter.

    The moments exist from the start, so that a checkpoint can be read into them.
    """
    groups = [
        {"params": [shard.local for shard in shards if decays(shard.name)], "weight_decay": spec.weight_decay},
        {"params": [shard.local for shard in shards if not decays(shard.name)], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    optimizer = torch.optim.AdamW(groups, lr=spec.lr, betas=spec.betas, fused=True)
    for shard in shards:
        optimizer.state[shard.local] = {
            "step": torch.zeros((), dtype=torch.float32, device=shard.local.device),
            "exp_avg": torch.zeros_like(shard.local),
            "exp_avg_sq": torch.zeros_like(shard.local),
        }
    return optimizer
