"""`datasets` and torch's DataLoader over the same shards: the same batches of pixels in [-1, 1] and captions.

Runs in this folder's own venv. Three ways, of which the benchmark takes the cheapest:

* decode: each image is decoded when its batch is made, in this process;
* workers: the same in two worker processes;
* arrays: all images were decoded once, before anything is measured, and are kept as numbers.

The last line printed is a JSON object: samples, and seconds of CPU of this process and its children.
"""

import argparse
import json
import resource

import numpy as np
import torch
from datasets import Dataset, Features, Sequence, Value, load_dataset
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--shards", required=True, help="a pattern of Parquet files")
parser.add_argument("--way", choices=("decode", "workers", "arrays"), required=True)
parser.add_argument("--batch", type=int, required=True)
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--channels", type=int, required=True)
arguments = parser.parse_args()
torch.set_num_threads(1)


def pixels_of(images: np.ndarray) -> torch.Tensor:
    pixels = torch.from_numpy(images).float().div_(127.5).sub_(1)
    return pixels[:, None] if pixels.dim() == 3 else pixels.permute(0, 3, 1, 2).contiguous()


def collated(batch: list[dict]) -> tuple[torch.Tensor, tuple[str, ...]]:
    images = np.stack([np.asarray(row["image"], dtype=np.uint8) for row in batch])
    return pixels_of(images), tuple(row["text"] for row in batch)


def as_arrays(data: Dataset) -> Dataset:
    """Each image as a list of known length: `Array2D` and `Array3D` cost several times as much to read."""
    numbers = Sequence(Value("uint8"), length=np.asarray(data[0]["image"]).size)
    return data.map(
        lambda row: {"image": np.asarray(row["image"]).ravel()},
        features=Features({"image": numbers, "text": Value("string")}),
        keep_in_memory=True,
    ).with_format("numpy")


class Batches(torch.utils.data.Dataset):
    """A whole batch of arrays by one look-up, which is the cheapest that `datasets` has."""

    def __init__(self, data: Dataset, shape: tuple[int, ...]) -> None:
        self.data, self.shape = data, shape

    def __getitem__(self, rows: list[int]) -> tuple[torch.Tensor, tuple[str, ...]]:
        found = self.data[rows]
        return pixels_of(found["image"].reshape(-1, *self.shape)), tuple(found["text"])

    def __len__(self) -> int:
        return len(self.data)


def cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


data = load_dataset("parquet", data_files=arguments.shards, split="train").select_columns(["image", "text"])
if arguments.way == "arrays":
    arrays = as_arrays(data)
    sampler = torch.utils.data.RandomSampler(arrays)
    batches = torch.utils.data.BatchSampler(sampler, arguments.batch, drop_last=True)
    loader = DataLoader(
        Batches(arrays, np.asarray(data[0]["image"]).shape),
        sampler=batches,
        batch_size=None,
        collate_fn=lambda batch: batch,
    )
else:
    workers = {"num_workers": 2, "persistent_workers": True} if arguments.way == "workers" else {}
    loader = DataLoader(data, arguments.batch, shuffle=True, drop_last=True, collate_fn=collated, **workers)

began_s, steps, samples = cpu_s(), 0, 0
while steps < arguments.steps:
    for pixels, captions in loader:
        assert pixels.shape[:2] == (arguments.batch, arguments.channels)
        assert len(captions) == arguments.batch
        steps, samples = steps + 1, samples + arguments.batch
        if steps == arguments.steps:
            break
if arguments.way == "workers":
    # A child's seconds are counted once it has ended.
    loader._iterator._shutdown_workers()
print(json.dumps({"samples": samples, "cpu_s": cpu_s() - began_s}))
