"""One rank's part of a checkpoint as one file: a header that never changes, then the tensors' bytes.

The file is what `torch.distributed.checkpoint.HuggingFaceStorageWriter(save_distributed=True)` writes (safetensors,
with each shard's offsets in the header), so DCP's `HuggingFaceStorageReader` loads it at any world size. Names, shapes
and offsets stay the same for the life of a generation, so the header is made once by the library and a save is a copy
into a flat buffer and a write of it: no planning, no pickling, no collective per tensor.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from tidegate.checkpoint.files import FileSeen
from tidegate.errors import CheckpointError

_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank holds of one tensor."""

    name: str
    local: Tensor
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offsets: tuple[int, ...]


def file_name(rank: int) -> str:
    """DCP's name for the only file of a rank; it counts from 1."""
    return f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"


class Stage:
    """A rank's parts, copied aside so that training may go on changing them."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._source = [part.local for part in parts]
        empty = {part.name: torch.empty_like(part.local, device="cpu") for part in parts}
        offsets = {part.name: {"saved_offsets": list(part.offsets)} for part in parts}
        raw = save(empty, metadata={"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"})
        start = _LENGTH_BYTES + int.from_bytes(raw[:_LENGTH_BYTES], "little")
        self._header, layout = raw[:start], json.loads(raw[_LENGTH_BYTES:start])
        # Zeroed, so that its pages exist before the first save.
        self._body = torch.zeros(len(raw) - start, dtype=torch.uint8)
        self._copy = [self._view(part, *layout[part.name]["data_offsets"]) for part in parts]

    def _view(self, part: Part, begin: int, end: int) -> Tensor:
        return self._body[begin:end].view(part.local.dtype).view(part.local.shape)

    def fill(self) -> None:
        """Copy what the parts hold now. When it returns the parts may change."""
        if self._source:
            torch._foreach_copy_(self._copy, self._source)

    def write(self, path: Path) -> FileSeen:
        """Write the copy durably.

        Raises:
            OSError: the disk's own.
        """
        body = memoryview(self._body.numpy())  # type: ignore[arg-type]  # numpy arrays are buffers from Python 3.12 on
        seen = hashlib.sha256(self._header)
        seen.update(body)
        with path.open("wb", buffering=0) as file:
            for piece in (memoryview(self._header), body):
                while piece:
                    piece = piece[file.write(piece) :]
            os.fsync(file.fileno())
        return FileSeen(name=path.name, bytes=len(self._header) + len(body), sha256=seen.hexdigest())


def read_parts(folder: Path, files: Sequence[str], parts: Sequence[Part]) -> None:
    """Fill `parts` in place from the shards of a checkpoint that any number of ranks may have written.

    Raises:
        CheckpointError: a tensor is missing, has another shape, or isn't covered by the shards.
    """
    wanted: Mapping[str, Part] = {part.name: part for part in parts}
    missing = {part.name: part.local.numel() for part in parts}
    for name in files:
        with safe_open(folder / name, framework="pt") as file:
            saved_at = _saved_at(file)
            for key in saved_at.keys() & wanted.keys():
                missing[key] -= _overlap_copied(file.get_slice(key), saved_at[key], wanted[key])
    short = sorted(name for name, numbers in missing.items() if numbers)
    if short:
        raise CheckpointError(f"{folder}: {len(short)} of {len(parts)} tensors not covered, first {short[0]}")


def whole_shapes(folder: Path, files: Sequence[str]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and type of every tensor of a checkpoint, put together from its shards' headers."""
    whole: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for name in files:
        with safe_open(folder / name, framework="pt") as file:
            for key, begin in _saved_at(file).items():
                saved = file.get_slice(key)
                ends = tuple(map(sum, zip(begin, saved.get_shape(), strict=True)))
                known = whole[key][0] if key in whole else ends
                dtype = saved[tuple(slice(0, 0) for _ in ends)].dtype
                whole[key] = tuple(map(max, ends, known)), dtype
    return whole


def _saved_at(file: Any) -> dict[str, list[int]]:
    """Where in the whole tensors a file's shards begin."""
    info = json.loads((file.metadata() or {})["DCP_SHARDING_INFO"])
    return {key: value["saved_offsets"] for key, value in info.items()}


def _overlap_copied(saved: Any, saved_at: Sequence[int], part: Part) -> int:
    """Copy where the saved box and the part's box overlap; how many numbers that was."""
    theirs, ours, total = [], [], 1
    shape: list[int] = saved.get_shape()
    if len(shape) != len(part.shape):
        raise CheckpointError(f"{part.name}: has {len(shape)} dimensions, the network's has {len(part.shape)}")
    for begin, length, whole, mine, mine_length in zip(
        saved_at, shape, part.shape, part.offsets, part.local.shape, strict=True
    ):
        if begin + length > whole:
            raise CheckpointError(f"{part.name}: reaches to {begin + length}, the network's has {whole}")
        first, last = max(begin, mine), min(begin + length, mine + mine_length)
        if last <= first:
            return 0
        theirs.append(slice(first - begin, last - begin))
        ours.append(slice(first - mine, last - mine))
        total *= last - first
    part.local[tuple(ours)].copy_(saved[tuple(theirs)])
    return total
