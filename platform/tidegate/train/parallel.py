"""The ranks of one generation: how they meet, and how the network is split over them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

_SAVE_TIMEOUT_S = 1800.0
"""How long ranks wait for the slowest one's disk."""


@dataclass(frozen=True, slots=True)
class World:
    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    saving: dist.ProcessGroup
    """A gloo group of its own for checkpoints: collectives of a background thread on the training group would
    interleave with the step's."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of one parameter that this rank owns."""

    name: str
    local: Tensor
    """Shares its memory with the parameter; never empty."""
    parameter: nn.Parameter
    shape: tuple[int, ...]
    """Of the whole parameter."""
    offsets: tuple[int, ...]
    """Where `local` stands in it."""

    @property
    def gradient(self) -> Tensor:
        gradient = self.parameter.grad
        if gradient is None:
            raise RuntimeError(f"{self.name} has no gradient: it took no part in the loss")
        return gradient.to_local() if isinstance(gradient, DTensor) else gradient


@contextmanager
def joined(timeout_s: float) -> Iterator[World]:
    """Meet the other ranks, as torchrun's environment variables say; without them, be alone. Leaving parts again."""
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    store = _meeting_place(rank, size, timedelta(seconds=timeout_s))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        saving = dist.new_group(backend="gloo", timeout=timedelta(seconds=_SAVE_TIMEOUT_S))
        mesh = init_device_mesh(device.type, (size,), mesh_dim_names=("shard",))
        yield World(rank=rank, size=size, device=device, mesh=mesh, saving=saving)
    finally:
        dist.destroy_process_group()


def _meeting_place(rank: int, size: int, timeout: timedelta) -> Store:
    if "MASTER_ADDR" not in os.environ:
        return HashStore()
    store, _, _ = next(rendezvous("env://", rank, size, timeout=timeout))
    # torchrun of torch 2.13 gives a restart the store of the attempt before, where gloo would find the dead ranks'
    # addresses and wait for them.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"attempt-{attempt}", store)


def split(network: nn.Module, world: World) -> list[Shard]:
    """Shard `network` in place over all ranks (FSDP2 around the root: right for networks whose weights fit a rank
    during a step) and list what this rank owns. All ranks must hold the same weights."""
    # FSDP warns of changing its output in place, which nothing here does.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor", category=UserWarning)
    fully_shard(network.to(world.device), mesh=world.mesh)
    shards = []
    for name, parameter in network.named_parameters():
        if not isinstance(parameter, DTensor):
            raise RuntimeError(f"{name} was not sharded")
        local = parameter.to_local().detach()
        if local.numel():
            _, offsets = compute_local_shape_and_global_offset(parameter.shape, world.mesh, parameter.placements)
            shards.append(Shard(name, local, parameter, tuple(parameter.shape), tuple(offsets)))
    return shards


def whole_weights(network: nn.Module) -> dict[str, Tensor]:
    """The full weights on the CPU. All ranks must call it together."""
    network.unshard()  # type: ignore[operator]
    weights = {name: tensor.detach().cpu().clone() for name, tensor in network.named_parameters()}
    network.reshard()  # type: ignore[operator]
    return weights
