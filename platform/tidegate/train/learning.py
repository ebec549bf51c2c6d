"""What a batch teaches: its loss in a stage, and what all ranks learn of a step together."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tidegate.data.dataset import Dataset
from tidegate.data.loader import Batch
from tidegate.train.config import RunConfig
from tidegate.train.inputs import Inputs
from tidegate.train.model import velocity
from tidegate.train.objective import draw, loss_sum, mix, shift_of
from tidegate.train.parallel import Shard, World, squared_norm
from tidegate.train.stages import Stage


@dataclass(frozen=True, slots=True)
class Ready:
    """A batch as the network takes it, on the CPU but for `places`; for a GPU in memory that it reads directly."""

    batch: Batch
    image: Tensor
    """(B, tokens, C · patch²) float32, like `noise`."""
    noise: Tensor
    times: Tensor
    """(B,) float32."""
    states: Tensor
    """(B, length, layers, width)."""
    mask: Tensor
    """(B, length) bool."""
    places: Tensor
    """(length + tokens, 3), on the device."""


class Lesson:
    """The objective of one stage."""

    def __init__(self, config: RunConfig, stage: Stage, data: Dataset, device: torch.device) -> None:
        self._config, self._stage, self._device = config, stage, device
        self._inputs = Inputs(config, stage, data, device)

    def ready(self, batch: Batch) -> Ready:
        """What `loss` is of. It follows from the batch alone, so another thread can have it done while a step runs."""
        spec, step, seed = self._config.objective, self._stage.begins + batch.step, self._config.seed
        given = self._inputs.of(batch)
        shift = shift_of(self._stage.shift, given.image.shape[1])
        noise, times = draw(seed, step, batch.positions, given.image.shape[1:], spec, shift)

        def reachable(part: Tensor) -> Tensor:
            return part.pin_memory() if self._device.type == "cuda" else part

        return Ready(
            batch=batch,
            image=reachable(given.image),
            noise=reachable(noise),
            times=reachable(times),
            states=reachable(given.states),
            mask=reachable(given.mask),
            places=given.places,
        )

    def loss(self, network: nn.Module, ready: Ready) -> Tensor:
        """Sum of the losses of a batch's samples."""
        parts = (ready.image, ready.noise, ready.times, ready.states, ready.mask)
        image, noise, times, states, mask = (part.to(self._device, non_blocking=True) for part in parts)
        guess = velocity(network, mix(image, noise, times), states, mask, times, ready.places)
        return loss_sum(guess, image, noise)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What all ranks know after a step's gradients: one all-reduce."""

    loss: float
    grad_norm: float
    stop: bool
    bad_ranks: tuple[int, ...]
    """Those whose own loss was not finite."""

    @property
    def finite(self) -> bool:
        return not self.bad_ranks and math.isfinite(self.loss) and math.isfinite(self.grad_norm)


def agreed(
    world: World, held: list[Shard], gradients: list[Tensor], loss: Tensor, *, global_batch: int, stop: bool
) -> Verdict:
    """Sum [loss, squared gradient norm, stop, one flag a rank] over ranks, the step's only message of ours.

    `loss` is the sum over this rank's samples. All ranks call it together.
    """
    facts = torch.zeros(3 + world.size, dtype=torch.float32, device=world.device)
    facts[0] = loss / world.shape.tensor  # tensor peers have the same one
    squares_here = squared_norm(held, gradients)
    if squares_here is not None:
        facts[1] = squares_here
    facts[2] = float(stop)
    facts[3 + world.rank] = float(not torch.isfinite(loss))
    dist.all_reduce(facts)
    total, squares, stops, *bad = facts.tolist()
    return Verdict(
        loss=total / global_batch,
        grad_norm=math.sqrt(squares) if squares >= 0 else math.nan,
        stop=stops > 0,
        bad_ranks=tuple(rank for rank, flag in enumerate(bad) if flag),
    )
