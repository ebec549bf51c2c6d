"""Batches for one rank."""

from __future__ import annotations

import threading
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from captioned import captioned_images
from tidegate.data.dataset import Dataset
from tidegate.data.loader import Batch, Loader
from tidegate.data.prepare import prepare
from tidegate.errors import DataError

STEPS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("set")
    prepare(captioned_images(root / "images", 25), root / "data", seed=0, rows_per_shard=10)
    return root / "data"


def batches(folder: Path, start: int, end: int = STEPS, rank: int = 0, world_size: int = 1) -> list[Batch]:
    data = Dataset(folder, width=4, height=4, channels=1)
    with Loader(
        data, seed=9, global_batch=7, rank=rank, world_size=world_size, start_step=start, end_step=end
    ) as loader:
        return list(loader)


def ids(found: list[Batch]) -> list[tuple[int, ...]]:
    return [batch.ids for batch in found]


def test_a_resume_starts_at_its_step_and_so_does_the_second(folder: Path) -> None:
    """C078: the thread that reads ahead starts at the resumed step. C080: also after a second resume."""
    unbroken = batches(folder, 0)
    assert [batch.step for batch in unbroken] == list(range(STEPS))
    assert ids(batches(folder, 5)) == ids(unbroken)[5:]
    assert ids(batches(folder, 0, 3)) + ids(batches(folder, 3, 5)) + ids(batches(folder, 5)) == ids(unbroken)


def test_what_was_read_ahead_and_not_used_comes_again(folder: Path) -> None:
    """C081: two batches used, more were read; the next run gets the third."""
    data = Dataset(folder, width=4, height=4, channels=1)
    with Loader(data, seed=9, global_batch=7, rank=0, world_size=1, start_step=0, end_step=STEPS) as loader:
        used = list(islice(loader, 2))
    assert ids(used) + ids(batches(folder, 2)) == ids(batches(folder, 0))


def test_any_world_size_sees_the_same_batches(folder: Path) -> None:
    """A run that goes on with another number of ranks has the same global batches."""
    whole = ids(batches(folder, 0, 4))
    for world_size in (2, 3, 6):
        parts = [batches(folder, 0, 4, rank, world_size) for rank in range(world_size)]
        assert [sum((part[step].ids for part in parts), ()) for step in range(4)] == whole
        positions = [position for part in parts for position in part[0].positions]
        assert positions == list(range(7))


@pytest.mark.parametrize(("workers", "kind"), [(3, "thread"), (2, "process")])
def test_threads_and_processes_read_the_same_batches(folder: Path, workers: int, kind: Any) -> None:
    """C081, C078: in order, from the step that is asked for, and again after what was read ahead was thrown away."""
    one = batches(folder, 2)
    data = Dataset(folder, width=4, height=4, channels=1)
    with Loader(
        data,
        seed=9,
        global_batch=7,
        rank=0,
        world_size=1,
        start_step=2,
        end_step=STEPS,
        workers=workers,
        kind=kind,
    ) as loader:
        assert ids(list(islice(loader, 3))) == ids(one)[:3]
        found = list(loader)
    assert ids(found) == ids(one)
    assert all(torch.equal(a.pixels, b.pixels) and a.captions == b.captions for a, b in zip(found, one, strict=True))


def test_what_does_not_fit_the_cache_is_read_again(folder: Path) -> None:
    small = Dataset(folder, width=4, height=4, channels=1, cache_bytes=10)
    large = Dataset(folder, width=4, height=4, channels=1)
    for step in range(6):
        ours, theirs = (data.rows(data.ids(9, step, 7)) for data in (small, large))
        assert (ours.pixels == theirs.pixels).all()
        assert ours.captions == theirs.captions
    assert len(small._cache._read) == 1
    assert len(large._cache._read) == 3


def test_one_size_a_batch(tmp_path: Path) -> None:
    """C071, C075 with buckets: at 3 ranks the parts make the batches of one rank, and no batch mixes sizes."""
    images = captioned_images(tmp_path / "images", 12)
    for number in range(7):
        Image.fromarray(np.full((4, 8), 40 * number, dtype=np.uint8)).save(images / f"{number:03d}.png")
    prepare(images, tmp_path / "data", seed=0, rows_per_shard=3)
    with pytest.raises(DataError, match="images must be 4x4, has 5 of 4x4, 7 of 8x4"):
        Dataset(tmp_path / "data", width=4, height=4, channels=1)
    data = Dataset(tmp_path / "data", width=4, height=4, channels=1, buckets=True)

    def read(rank: int, world_size: int) -> list[Batch]:
        loader = Loader(data, seed=9, global_batch=4, rank=rank, world_size=world_size, start_step=0, end_step=10)
        with loader:
            return list(loader)

    whole, parts = read(0, 1), [read(rank, 3) for rank in range(3)]
    assert {str(batch.size) for batch in whole} == {"4x4", "8x4"}
    for step, batch in enumerate(whole):
        assert batch.pixels.shape[1:] == (1, 4, batch.size.width)
        assert sum((part[step].ids for part in parts), ()) == batch.ids
        assert torch.equal(torch.cat([part[step].pixels for part in parts]), batch.pixels)


def test_pixels_and_captions_belong_together(folder: Path) -> None:
    seen = {}
    for batch in batches(folder, 0):
        assert batch.pixels.shape == (7, 1, 4, 4)
        assert batch.pixels.dtype == torch.float32
        for sample, pixels, caption in zip(batch.ids, batch.pixels, batch.captions, strict=True):
            assert pixels.unique().numel() == 1
            seen[sample] = (round(float(pixels.mean()), 3), caption)
    levels = sorted(seen.values())
    assert len(levels) == 25
    assert (levels[0][0], levels[-1][0]) == (-1.0, 1.0)
    assert [caption for _, caption in levels] == ["black"] * 9 + ["grey"] * 8 + ["white"] * 8


def test_leaving_early_ends_the_thread(folder: Path) -> None:
    data = Dataset(folder, width=4, height=4, channels=1)
    with Loader(data, seed=9, global_batch=7, rank=0, world_size=1, start_step=0, end_step=10**9) as loader:
        next(iter(loader))
        assert reading_ahead()
    assert not reading_ahead()


def reading_ahead() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("read-ahead")]


def test_images_of_another_size_are_refused_before_training(folder: Path) -> None:
    with pytest.raises(DataError, match="images must be 8x8, has 25 of 4x4\nhint: "):
        Dataset(folder, width=8, height=8, channels=1)


def test_a_cut_shard_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    shard = copy / "train-00001-of-00003.parquet"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"train-00001-of-00003\.parquet: .* bytes, must be .* bytes\nhint: "):
        Dataset(copy, width=4, height=4, channels=1)
    # Same size, other bytes: found when it is read, in the thread, and raised where the batch is waited for.
    shard.write_bytes(bytes((folder / shard.name).stat().st_size))
    with pytest.raises(DataError, match=r"train-00001-of-00003\.parquet"):
        batches(copy, 0)


def test_no_data_set_names_the_fix(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"index\.json: No such file or directory\nhint: prepare it"):
        Dataset(tmp_path, width=4, height=4, channels=1)
