"""What a rank trains: its part of the network's weights and of AdamW's moments. Updated, carried over, saved."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor

from tidegate.checkpoint.layout import Part
from tidegate.checkpoint.restore import MODEL
from tidegate.train.config import RunConfig
from tidegate.train.network import grown
from tidegate.train.optim import adamw
from tidegate.train.parallel import World, shards_of
from tidegate.train.stages import Stage

MOMENTS = ("exp_avg.", "exp_avg_sq.")
"""Prefixes of AdamW's moments in a checkpoint, beside the weights' `MODEL`."""


class Learner:
    """Begins with fresh weights and moments, made for `stage`."""

    def __init__(self, config: RunConfig, stage: Stage, world: World) -> None:
        self._config, self._world = config, world
        self.updates = 0
        """Steps that changed the weights."""
        self.begin_anew(stage)

    def begin_anew(self, stage: Stage) -> None:
        """Fresh weights and moments."""
        self.network = grown(self._config, stage, self._world)
        self.shards = shards_of(self.network, self._world)
        self._parameters = list(self.network.parameters())
        """Of the whole network: also those of which this rank holds nothing."""
        self._optimizer = adamw(self.shards, self._config.optimizer)
        self._shaped_for = _shape_of(stage)

    def enter(self, stage: Stage) -> None:
        """Be made for `stage`, with the weights and moments that there are."""
        if _shape_of(stage) == self._shaped_for:
            return
        carried = [part.local.cpu() for part in self.parts(all_copies=True)]
        del self.network, self.shards, self._parameters, self._optimizer
        gc.collect()  # a split network is full of cycles, and there is no room for two
        self.begin_anew(stage)
        for part, tensor in zip(self.parts(all_copies=True), carried, strict=True):
            part.local.copy_(tensor)
        self.count(self.updates)

    def gradients(self) -> list[Tensor]:
        return [shard.gradient for shard in self.shards]

    def update(self, gradients: list[Tensor], grad_norm: float, rate: float) -> None:
        """One step of AdamW, the gradients clipped to the config's norm."""
        clip = self._config.optimizer.clip_norm
        if gradients and grad_norm > clip:
            torch._foreach_mul_(gradients, clip / grad_norm)
        for shard, gradient in zip(self.shards, gradients, strict=True):
            shard.local.grad = gradient
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self.updates += 1

    def forget_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def parts(self, *, all_copies: bool = False) -> list[Part]:
        """What this rank saves: where several hold the same, one of them does. With `all_copies`: all that it holds."""
        parts = []
        for shard in self.shards:
            if not (shard.saves or all_copies):
                continue
            moments = self._optimizer.state[shard.local]
            tensors = {MODEL: shard.local, **{kind: moments[kind.removesuffix(".")] for kind in MOMENTS}}
            parts += [Part(kind + shard.name, tensor, shard.shape, shard.offsets) for kind, tensor in tensors.items()]
        return parts

    def count(self, updates: int) -> None:
        """The parts have been filled with what they were after so many updates."""
        self.updates = updates
        for shard in self.shards:
            self._optimizer.state[shard.local]["step"].fill_(updates)


def _shape_of(stage: Stage) -> tuple[Any, ...]:
    """What a network must be made anew for."""
    return stage.precision, stage.float8, stage.activation_checkpointing
