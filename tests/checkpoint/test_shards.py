"""One file a rank, read back by any number of ranks and by torch itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from folders import parts_of, tensors, write_checkpoint

from tidegate.checkpoint.restore import full_model_weights, load, newest_good
from tidegate.checkpoint.shards import Part, Stage, read_parts
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


def test_what_changes_after_the_copy_is_not_saved(tmp_path: Path) -> None:
    """C061: weights change as soon as the save gives control back."""
    [part] = parts_of({"model.even": torch.zeros(8, 3)}, 0, 1)
    stage = Stage([part])
    stage.fill()
    part.local.add_(1)
    stage.write(tmp_path / "shard.safetensors")
    read_parts(tmp_path, ["shard.safetensors"], [part])
    assert torch.equal(part.local, torch.zeros(8, 3))


def test_tensors_of_any_type(tmp_path: Path) -> None:
    whole = {"a": torch.arange(6, dtype=torch.bfloat16), "b": torch.tensor([1, 2**40]), "c": torch.ones(3)}
    parts = [Part(name, tensor.clone(), tuple(tensor.shape), (0,)) for name, tensor in whole.items()]
    stage = Stage(parts)
    stage.fill()
    stage.write(tmp_path / "shard.safetensors")
    for part in parts:
        part.local.zero_()
    read_parts(tmp_path, ["shard.safetensors"], parts)
    assert all(torch.equal(part.local, whole[part.name]) for part in parts)


def test_another_network_is_refused(tmp_path: Path) -> None:
    """C074: a tensor under another name, or of another shape, is never left as it was in silence."""
    folder = write_checkpoint(tmp_path, 20, world_size=2)
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    renamed = Part("model.other", torch.zeros(8, 3), (8, 3), (0, 0))
    with pytest.raises(CheckpointError, match=r"1 of 1 tensors not covered, first model\.other"):
        read_parts(folder, files, [renamed])
    longer = Part("model.even", torch.zeros(9, 3), (9, 3), (0, 0))
    with pytest.raises(CheckpointError, match=r"not covered, first model\.even"):
        read_parts(folder, files, [longer])
    shorter = Part("model.even", torch.zeros(7, 3), (7, 3), (0, 0))
    with pytest.raises(CheckpointError, match=r"model\.even: reaches to 8, the network's has 7"):
        read_parts(folder, files, [shorter])


def test_the_weights_alone(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 20, world_size=3)
    checkpoint = newest_good(tmp_path).checkpoint
    assert checkpoint is not None
    weights = full_model_weights(checkpoint)
    assert set(weights) == {"even", "uneven", "few"}
    assert torch.equal(weights["uneven"], tensors(20)["model.uneven"])
