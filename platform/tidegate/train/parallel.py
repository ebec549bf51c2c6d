"""The ranks of one generation: how they meet, and how the network is split over them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tidegate.train.config import ParallelSpec
from tidegate.train.mesh import MeshShape, mesh_shape

_SAVE_TIMEOUT_S = 1800.0
"""How long ranks wait for the slowest one's disk."""


@dataclass(frozen=True, slots=True)
class World:
    rank: int
    size: int
    device: torch.device
    shape: MeshShape
    mesh: DeviceMesh
    """Axes `replicate`, `shard` and `tensor`, the first and the last only where they are longer than 1."""
    saving: dist.ProcessGroup
    """A gloo group of its own for checkpoints: collectives of a background thread on the training group would
    interleave with the step's."""

    @property
    def data_rank(self) -> int:
        """Which part of the global batch is this rank's; tensor peers share theirs."""
        return self.rank // self.shape.tensor

    @property
    def data_size(self) -> int:
        return self.shape.data

    @property
    def data_mesh(self) -> DeviceMesh:
        """Over which FSDP splits, and replicates where there is a second axis."""
        axes = ("replicate", "shard") if self.shape.replicate > 1 else ("shard",)
        return self.mesh if self.mesh.mesh_dim_names == axes else self.mesh[axes]

    @property
    def tensor_mesh(self) -> DeviceMesh | None:
        return self.mesh["tensor"] if self.shape.tensor > 1 else None


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of one parameter that this rank holds."""

    name: str
    local: Tensor
    """Shares its memory with the parameter; never empty."""
    parameter: nn.Parameter
    shape: tuple[int, ...]
    """Of the whole parameter."""
    offsets: tuple[int, ...]
    """Where `local` stands in it."""
    copies: int = 1
    """How many ranks hold this same part."""
    saves: bool = True
    """Whether this rank is the one of them that saves it."""

    @property
    def gradient(self) -> Tensor:
        gradient = self.parameter.grad
        if gradient is None:
            raise RuntimeError(f"{self.name} has no gradient: it took no part in the loss")
        return gradient.to_local() if isinstance(gradient, DTensor) else gradient


@contextmanager
def joined(timeout_s: float, spec: ParallelSpec | None = None) -> Iterator[World]:
    """Meet the other ranks, as torchrun's environment variables say; without them, be alone. Leaving parts again.

    Raises:
        ConfigError: so many ranks can't stand as `spec` says.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    shape = mesh_shape(size, spec or ParallelSpec())
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
        # An axis costs a process group for each of its rows, so one of length 1 is left out; `shard` is FSDP's own.
        sizes = {"replicate": shape.replicate, "shard": shape.shard, "tensor": shape.tensor}
        axes = {name: length for name, length in sizes.items() if length > 1 or name == "shard"}
        mesh = init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
        yield World(rank=rank, size=size, device=device, shape=shape, mesh=mesh, saving=saving)
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


def shards_of(network: nn.Module, world: World) -> list[Shard]:
    """What this rank holds of a network that `tidegate.train.network.split` has split."""
    shards = []
    for number, (name, parameter) in enumerate(network.named_parameters()):
        if not isinstance(parameter, DTensor):
            raise RuntimeError(f"{name} was not sharded")
        local = parameter.to_local().detach()
        if local.numel():
            mesh = parameter.device_mesh
            _, offsets = compute_local_shape_and_global_offset(parameter.shape, mesh, parameter.placements)
            copies, mine = _copies(parameter, world)
            saves = number % copies == mine  # in turn, so that all who hold copies write about as much
            shards.append(Shard(name, local, parameter, tuple(parameter.shape), tuple(offsets), copies, saves))
    return shards


def _copies(parameter: DTensor, world: World) -> tuple[int, int]:
    """How many ranks hold the same part of a parameter, and which of them this one is."""
    names, placements = parameter.device_mesh.mesh_dim_names or (), parameter.placements
    split_over = {name for name, kind in zip(names, placements, strict=True) if not kind.is_replicate()}
    copies, mine = 1, 0
    for axis in world.mesh.mesh_dim_names or ():
        if axis not in split_over:
            length = world.mesh[axis].size()
            copies, mine = copies * length, mine * length + world.mesh[axis].get_local_rank()
    return copies, mine


def squared_norm(shards: list[Shard], gradients: list[Tensor]) -> Tensor | None:
    """This rank's share of the squared length of the whole gradient; summed over all ranks they give it. None where it
    holds nothing."""
    total: Tensor | None = None
    for copies in sorted({shard.copies for shard in shards}):
        alike = [gradient for shard, gradient in zip(shards, gradients, strict=True) if shard.copies == copies]
        part = torch.stack(torch._foreach_norm(alike)).square().sum() / copies
        total = part if total is None else total + part
    return total


def whole_weights(network: nn.Module, *, keep: bool) -> dict[str, Tensor]:
    """The full weights on the CPU, one after the other; empty where not `keep`. All ranks must call it together."""
    weights = {}
    for name, parameter in network.named_parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        if keep:
            weights[name] = whole.detach().cpu().clone()
    return weights
