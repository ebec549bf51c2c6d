"""What differs between two checkpoints."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from folders import about, write_shard
from torch import Tensor

from tidegate.checkpoint.difference import Difference, differences
from tidegate.checkpoint.layout import Part
from tidegate.checkpoint.manifest import Manifest
from tidegate.checkpoint.tiers import FolderSource


def written(folder: Path, **tensors: Tensor) -> tuple[FolderSource, Manifest]:
    folder.mkdir()
    parts = [Part(name, value, tuple(value.shape), (0,) * value.dim()) for name, value in tensors.items()]
    return FolderSource(folder), about(0).model_copy(update={"files": (write_shard(folder, parts, 0),)})


@pytest.mark.parametrize("at_once_bytes", [1, 2**20])
def test_each_tensor_has_its_line(tmp_path: Path, at_once_bytes: int) -> None:
    same, row = torch.arange(6.0).reshape(2, 3), torch.tensor([1.0, math.nan, math.inf])
    first = written(tmp_path / "1", gone=same, longer=same, moved=same, nan=row, same=row, type=same)
    row2, moved = torch.tensor([1.0, 2.0, math.inf]), same.clone()
    moved[1, 1] -= 2.5
    second = written(
        tmp_path / "2", longer=torch.zeros(3, 3), moved=moved, nan=row2, new=same, same=row, type=same.bfloat16()
    )
    with first[0], second[0]:
        found = list(differences(first, second, at_once_bytes=at_once_bytes))
    assert [row.tensor for row in found] == ["gone", "longer", "moved", "nan", "new", "same", "type"]
    by_name = {row.tensor: row for row in found}
    assert by_name["gone"] == Difference("gone", None, "only in the first")
    assert by_name["new"] == Difference("new", None, "only in the second")
    assert by_name["longer"] == Difference("longer", None, "shape (2, 3) became (3, 3)")
    assert by_name["moved"] == Difference("moved", 2.5)
    assert by_name["nan"].max_abs is not None
    assert math.isnan(by_name["nan"].max_abs)
    assert by_name["same"].same
    assert by_name["type"] == Difference("type", 0.0, "float32 became bfloat16")
    assert not by_name["type"].same
