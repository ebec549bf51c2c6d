"""Checkpoints of a few tensors, written as a run of any number of ranks would have, without the ranks."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from tidegate.checkpoint.files import write_synced
from tidegate.checkpoint.layout import Part
from tidegate.checkpoint.manifest import MANIFEST, Manifest, ShardSeen, folder_name
from tidegate.checkpoint.slots import Slot


def tensors(step: int = 0) -> dict[str, Tensor]:
    """Sizes that 4 ranks split evenly, unevenly, and so that some get nothing."""
    rows = {"model.even": 8, "model.uneven": 6, "model.few": 2, "exp_avg.even": 8}
    return {
        name: torch.arange(count * 3, dtype=torch.float32).reshape(count, 3) + 1000 * number + step
        for number, (name, count) in enumerate(rows.items())
    }


def parts_of(whole: dict[str, Tensor], rank: int, world_size: int) -> list[Part]:
    """What FSDP2 gives a rank: rows in chunks of ceil(rows / ranks); the last ranks may get fewer, or none."""
    parts = []
    for name, tensor in whole.items():
        each = -(-tensor.shape[0] // world_size)
        local = tensor[rank * each : (rank + 1) * each].clone()
        if local.numel():
            parts.append(Part(name, local, tuple(tensor.shape), (rank * each, 0)))
    return parts


def about(step: int, generation: int = 0, world_size: int = 1) -> Manifest:
    return Manifest(
        run="r",
        generation=generation,
        step=step,
        updates=step,
        seed=0,
        global_batch=4,
        dataset="d",
        world_size=world_size,
    )


def write_shard(folder: Path, parts: list[Part], rank: int, step: int = 0) -> ShardSeen:
    """A rank's file, without the writer's process."""
    slot = Slot(parts, rank)
    slot.fill()
    shard = slot.seal(about(step))
    (folder / shard.name).write_bytes(os.pread(slot.handle, shard.bytes, 0))
    slot.close()
    return shard


def write_checkpoint(checkpoints: Path, step: int, *, generation: int = 0, world_size: int = 4) -> Path:
    folder = checkpoints / folder_name(step, generation)
    folder.mkdir(parents=True)
    files = [write_shard(folder, parts_of(tensors(step), rank, world_size), rank, step) for rank in range(world_size)]
    manifest = about(step, generation, world_size).model_copy(update={"files": tuple(files)})
    write_synced(folder / MANIFEST, manifest.model_dump_json().encode())
    return folder
