"""Samples that a run makes of itself while it trains."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from tidegate.data.order import share_range
from tidegate.train.parallel import World
from tidegate.train.recipe import Recipe
from tidegate.train.sample import drawn


def sample_grid(
    network: nn.Module, recipe: Recipe, prompts: tuple[str, ...], seed: int, world: World
) -> np.ndarray | None:
    """One image for each prompt, as one picture on rank 0, (H, W) or (H, W, C) uint8; None on the others. All ranks
    call it together, and each draws its part: nobody's random numbers or weights change."""
    most = -(-len(prompts) // world.data_size)
    mine = share_range(len(prompts), world.data_rank, world.data_size)
    # Every rank draws as many, since each forward pass is a round of collectives.
    places = (list(mine) + [0] * most)[:most]
    with torch.no_grad():
        images = drawn(network, recipe, [prompts[place] for place in places], [seed + place for place in places])
    for module in network.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # the root keeps what it has gathered until a backward pass, which does not come
    # By the training's own group: a save in flight has the other one, in another thread.
    part = torch.from_numpy(images).to(world.device)
    parts = [torch.empty_like(part) for _ in range(world.size)]
    dist.gather(part, parts if world.rank == 0 else None, dst=0)
    if world.rank != 0:
        return None
    counts = [len(share_range(len(prompts), rank, world.data_size)) for rank in range(world.data_size)]
    drawn_by = parts[:: world.shape.tensor]  # tensor peers have the same ones
    return tiled(torch.cat([part[:count] for part, count in zip(drawn_by, counts, strict=True)]).cpu().numpy())


def tiled(images: np.ndarray) -> np.ndarray:
    """(B, H, W, ...) side by side, in about as many rows as columns; white where there is no image."""
    count, height, width = images.shape[:3]
    columns = math.isqrt(count - 1) + 1
    rows = -(-count // columns)
    sheet = np.full((rows * columns, *images.shape[1:]), 255, np.uint8)
    sheet[:count] = images
    sheet = sheet.reshape(rows, columns, *images.shape[1:]).swapaxes(1, 2)
    return sheet.reshape(rows * height, columns * width, *images.shape[3:])
