"""One rank's part of a checkpoint as one file: a header, then the tensors' bytes.

The file is what `torch.distributed.checkpoint.HuggingFaceStorageWriter(save_distributed=True)` writes (safetensors,
with each shard's offsets in the header), so DCP's `HuggingFaceStorageReader` loads it at any world size. Three things
are ours and in nobody's way: the header is padded to whole pages, which direct I/O needs; it holds a hash of every
block of the body; and so the header's own hash, which the manifest has, vouches for the whole file.

Names, shapes and offsets stay the same for the life of a generation. So the header is laid out once, and a save is a
copy into a flat buffer and a write of it: no planning, no pickling, no collective per tensor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tidegate.checkpoint.manifest import ShardSeen
from tidegate.checkpoint.sums import BLOCK_BYTES, HEX_DIGITS, LENGTH_BYTES, PAGE, SUMS, block_bytes_for, sum_of
from tidegate.errors import CheckpointError

_OFFSETS = "DCP_SHARDING_INFO"
_CACHED_BYTES = 1 << 20

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""By safetensors' names."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


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


@dataclass(frozen=True, slots=True)
class Layout:
    """Where everything stands in a rank's file."""

    template: bytes
    """The header, with zeros in place of the hashes."""
    sums_at: int
    block_bytes: int
    body_bytes: int
    begins: Mapping[str, int]
    """Where a tensor begins in the body."""

    @property
    def size(self) -> int:
        """Of the file, in bytes."""
        return len(self.template) + self.body_bytes

    @property
    def padded_bytes(self) -> int:
        """Whole pages."""
        return -(-self.size // PAGE) * PAGE

    def header(self, sums: str) -> bytes:
        return self.template[: self.sums_at] + sums.encode() + self.template[self.sums_at + len(sums) :]


def laid_out(parts: Sequence[Part]) -> Layout:
    # The largest numbers first, as safetensors has them: each tensor then begins at a multiple of its numbers' size.
    ordered = sorted(parts, key=lambda part: -part.local.element_size())
    tensors: dict[str, object] = {}
    begins, end = {}, 0
    for part in ordered:
        begins[part.name], begin = end, end
        end += part.local.numel() * part.local.element_size()
        dtype = _NAMES[part.local.dtype]
        tensors[part.name] = {"dtype": dtype, "shape": list(part.local.shape), "data_offsets": [begin, end]}
    block = block_bytes_for(end)
    metadata = {
        "format": "pt",
        "DCP_VERSION": "1.0",
        _OFFSETS: json.dumps({part.name: {"saved_offsets": list(part.offsets)} for part in ordered}),
        BLOCK_BYTES: str(block),
        SUMS: "0" * (-(-end // block) * HEX_DIGITS),
    }
    text = json.dumps({"__metadata__": metadata, **tensors}, separators=(",", ":")).encode()
    padded = text.ljust(-(-(LENGTH_BYTES + len(text)) // PAGE) * PAGE - LENGTH_BYTES)
    template = len(padded).to_bytes(LENGTH_BYTES, "little") + padded
    mark = f'"{SUMS}":"'.encode()
    return Layout(template, template.index(mark) + len(mark), block, end, begins)


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor's piece in a shard."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    """In the body."""
    offsets: tuple[int, ...]
    """Where the piece stands in the whole tensor."""


@dataclass(frozen=True, slots=True)
class Header:
    file: ShardSeen
    tensors: Mapping[str, Saved]
    block_bytes: int
    sums: str

    @property
    def body_bytes(self) -> int:
        return self.file.bytes - self.file.header_bytes

    @property
    def cached_bytes(self) -> int:
        """So many bytes, whole blocks, are checked and then copied: they are in a processor's cache in between."""
        return max(self.block_bytes, _CACHED_BYTES // self.block_bytes * self.block_bytes)

    def check(self, begin: int, data: memoryview) -> None:
        """Check whole blocks of the body, the first of which begins at `begin`.

        Raises:
            CheckpointError: a block isn't what was saved.
        """
        for at in range(0, len(data), self.block_bytes):
            digit = (begin + at) // self.block_bytes * HEX_DIGITS
            if sum_of(data[at : at + self.block_bytes]) != self.sums[digit : digit + HEX_DIGITS]:
                where = self.file.header_bytes + begin + at
                raise CheckpointError(f"{self.file.name}: content differs from its hash at byte {where}")


def parse_header(file: ShardSeen, data: memoryview) -> Header:
    """
    Raises:
        CheckpointError: it isn't the header that was saved.
    """
    if sum_of(data) != file.xxh3_128:
        raise CheckpointError(f"{file.name}: header differs from the manifest's hash")
    raw = json.loads(bytes(data[LENGTH_BYTES:]))
    metadata = raw.pop("__metadata__")
    offsets = json.loads(metadata[_OFFSETS])
    tensors = {
        name: Saved(
            dtype=DTYPES[entry["dtype"]],
            shape=tuple(entry["shape"]),
            begin=entry["data_offsets"][0],
            offsets=tuple(offsets[name]["saved_offsets"]),
        )
        for name, entry in raw.items()
    }
    return Header(file, tensors, int(metadata[BLOCK_BYTES]), metadata[SUMS])
