"""One file a rank, read back by any number of ranks and by torch itself."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from folders import about, parts_of, tensors, write_checkpoint, write_shard
from safetensors.torch import load_file

from tidegate.checkpoint.layout import Part
from tidegate.checkpoint.manifest import ShardSeen
from tidegate.checkpoint.reading import read_parts
from tidegate.checkpoint.restore import full_model_weights, load, newest_good, verified
from tidegate.checkpoint.slots import Slot
from tidegate.checkpoint.tiers import FolderSource
from tidegate.errors import CheckpointError


@pytest.mark.parametrize("saved", [1, 4, 6])
@pytest.mark.parametrize("loaded", [1, 2, 3, 5])
def test_any_world_size_loads_any_other(tmp_path: Path, saved: int, loaded: int) -> None:
    """C073: 6 rows over 4 ranks are 2, 2, 2, 0. C071: saved by 4 and loaded by 2, nothing is dropped."""
    write_checkpoint(tmp_path, 20, world_size=saved)
    checkpoint = newest_good(tmp_path).checkpoint
    assert checkpoint is not None
    for rank in range(loaded):
        empty = {name: torch.full_like(tensor, torch.nan) for name, tensor in tensors().items()}
        parts = parts_of(empty, rank, loaded)
        load(checkpoint, parts)
        for got, want in zip(parts, parts_of(tensors(20), rank, loaded), strict=True):
            assert torch.equal(got.local, want.local), got.name


def test_torch_reads_it(tmp_path: Path) -> None:
    """The format is DCP's own."""
    folder = write_checkpoint(tmp_path, 20, world_size=4)
    state = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
    for name, want in tensors(20).items():
        assert torch.equal(state[name], want), name


def read(folder: Path, files: list[ShardSeen], parts: list[Part]) -> int:
    with FolderSource(folder) as source:
        return read_parts(source, files, parts)


def test_what_changes_after_the_copy_is_not_saved(tmp_path: Path) -> None:
    """C061: weights change as soon as the save gives control back."""
    [part] = parts_of({"model.even": torch.zeros(8, 3)}, 0, 1)
    slot = Slot([part], 0)
    slot.fill()
    part.local.add_(1)
    shard = slot.seal(about(0))
    (tmp_path / shard.name).write_bytes(os.pread(slot.handle, shard.bytes, 0))
    slot.close()
    read(tmp_path, [shard], [part])
    assert torch.equal(part.local, torch.zeros(8, 3))


def test_tensors_of_any_type(tmp_path: Path) -> None:
    whole = {
        "a": torch.arange(6, dtype=torch.bfloat16),
        "b": torch.tensor([1, 2**40]),
        "c": torch.ones(3),
        "scalar": torch.tensor(7.0),
        "odd": torch.tensor([1, 2, 3], dtype=torch.uint8),
    }
    parts = [Part(name, tensor.clone(), tuple(tensor.shape), (0,) * tensor.dim()) for name, tensor in whole.items()]
    shard = write_shard(tmp_path, parts, 0)
    for part in parts:
        part.local.zero_()
    read(tmp_path, [shard], parts)
    assert all(torch.equal(part.local, whole[part.name]) for part in parts)
    assert all(torch.equal(tensor, whole[name]) for name, tensor in load_file(tmp_path / shard.name).items())


def test_another_network_is_refused(tmp_path: Path) -> None:
    """C074: a tensor under another name, or of another shape, is never left as it was in silence."""
    folder = write_checkpoint(tmp_path, 20, world_size=2)
    files = list(verified(folder).files)
    renamed = Part("model.other", torch.zeros(8, 3), (8, 3), (0, 0))
    with pytest.raises(CheckpointError, match=r"1 of 1 tensors not covered, first model\.other"):
        read(folder, files, [renamed])
    longer = Part("model.even", torch.zeros(9, 3), (9, 3), (0, 0))
    with pytest.raises(CheckpointError, match=r"not covered, first model\.even"):
        read(folder, files, [longer])
    shorter = Part("model.even", torch.zeros(7, 3), (7, 3), (0, 0))
    with pytest.raises(CheckpointError, match=r"model\.even: reaches to 8, the network's has 7"):
        read(folder, files, [shorter])


def test_the_weights_alone(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 20, world_size=3)
    checkpoint = newest_good(tmp_path).checkpoint
    assert checkpoint is not None
    weights = full_model_weights(checkpoint)
    assert set(weights) == {"even", "uneven", "few"}
    assert torch.equal(weights["uneven"], tensors(20)["model.uneven"])
