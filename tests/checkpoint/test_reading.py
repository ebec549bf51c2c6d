"""A rank reads what it needs, once, and checks it."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import pytest
import torch
from folders import parts_of, write_shard
from torch import Tensor

from tidegate.checkpoint.layout import Part, laid_out
from tidegate.checkpoint.manifest import ShardSeen
from tidegate.checkpoint.reading import check_all, read_parts
from tidegate.checkpoint.tiers import FolderSource
from tidegate.errors import CheckpointError


class Counting:
    """A source that counts what it lends, and what of it did not go straight to its place."""

    streams, chunk_bytes = 3, 1 << 20

    def __init__(self, folder: Path, *, fills_any: bool = False) -> None:
        self._folder, self._source = folder, FolderSource(folder)
        self.fills_any = fills_any
        self.lent = self.aside = 0

    def view(self, file: str, offset: int, count: int, scratch: memoryview) -> memoryview:
        self.lent += count
        self.aside += count if len(scratch) == self.chunk_bytes else 0
        if not self.fills_any:
            return self._source.view(file, offset, count, scratch)
        with (self._folder / file).open("rb") as plain:
            plain.seek(offset)
            assert plain.readinto(scratch[:count]) == count
        return scratch[:count]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._source.__exit__()


def large() -> dict[str, Tensor]:
    """50 MB of a few tensors, so that shards span several chunks, and are read by direct I/O."""
    made = torch.Generator().manual_seed(0)
    rows = {"model.a": 3001, "model.b": 4096, "exp_avg.a": 3001, "model.c": 7}
    return {name: torch.randn(count, 1237, generator=made) for name, count in rows.items()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, list[ShardSeen]]]:
    """By 2 ranks and by 3."""
    made = {}
    for world_size in (2, 3):
        folder = tmp_path_factory.mktemp(f"by-{world_size}")
        shards = [write_shard(folder, parts_of(large(), rank, world_size), rank) for rank in range(world_size)]
        made[world_size] = (folder, shards)
    return made


@pytest.mark.parametrize("fills_any", [False, True])
@pytest.mark.parametrize(("saved_by", "read_by"), [(2, 2), (2, 3), (3, 2), (3, 1), (2, 5)])
def test_no_rank_reads_much_more_than_it_needs(
    saved: dict[int, tuple[Path, list[ShardSeen]]], saved_by: int, read_by: int, fills_any: bool
) -> None:
    folder, shards = saved[saved_by]
    for rank in range(read_by):
        want = parts_of(large(), rank, read_by)
        parts = [Part(part.name, torch.zeros_like(part.local), part.shape, part.offsets) for part in want]
        with Counting(folder, fills_any=fills_any) as source:
            count = read_parts(source, shards, parts)
        needed = sum(part.local.nbytes for part in parts)
        assert count == source.lent <= 1.05 * needed
        assert all(torch.equal(got.local, part.local) for got, part in zip(parts, want, strict=True))


def test_columns_of_what_was_saved_as_rows(saved: dict[int, tuple[Path, list[ShardSeen]]]) -> None:
    """Tensor parallel ranks hold columns, other types or memory that is not contiguous: all are filled."""
    folder, shards = saved[3]
    want = large()["model.b"]
    columns = Part("model.b", torch.zeros(4096, 100), (4096, 1237), (0, 400))
    halves = Part("model.a", torch.zeros(1000, 1237, dtype=torch.bfloat16), (3001, 1237), (1500, 0))
    turned = Part("model.c", torch.zeros(1237, 7).t(), (7, 1237), (0, 0))
    with FolderSource(folder) as source:
        read_parts(source, shards, [columns, halves, turned])
    assert torch.equal(columns.local, want[:, 400:500])
    assert torch.equal(halves.local, large()["model.a"][1500:2500].bfloat16())
    assert torch.equal(turned.local, large()["model.c"])


@pytest.mark.parametrize("at", [0, 5000, -1])
def test_a_flipped_bit_is_found_by_who_reads_it(tmp_path: Path, at: int) -> None:
    whole = large()
    shard = write_shard(tmp_path, parts_of(whole, 0, 1), 0)
    with (tmp_path / shard.name).open("r+b") as file:
        file.seek(at, 2 if at < 0 else 0)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 4]))
    says = "header differs" if 0 <= at < shard.header_bytes else "content differs from its hash at byte"
    with FolderSource(tmp_path) as source:
        for read in (lambda: check_all(source, [shard]), lambda: read_parts(source, [shard], parts_of(whole, 0, 1))):
            with pytest.raises(CheckpointError, match=says):
                read()


def test_the_header_is_whole_pages_and_numbers_stand_at_multiples_of_their_size() -> None:
    sizes = [torch.uint8, torch.float64, torch.bfloat16, torch.float32]
    parts = [Part(str(dtype), torch.zeros(3, dtype=dtype), (3,), (0,)) for dtype in sizes]
    layout = laid_out(parts)
    assert len(layout.template) % 4096 == 0
    assert all(layout.begins[part.name] % part.local.element_size() == 0 for part in parts)
