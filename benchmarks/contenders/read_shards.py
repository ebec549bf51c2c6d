"""Our loader over prepared shards, as one rank of one uses it; the counterpart of `benchmarks/peers/datasets/read.py`.

The last line printed is a JSON object: samples, seconds of CPU of this process and its children, and seconds.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path

import torch

from tidegate.data.dataset import Dataset
from tidegate.data.loader import Loader


def cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--shards", type=Path, required=True)
parser.add_argument("--side", type=int, required=True)
parser.add_argument("--channels", type=int, required=True)
parser.add_argument("--batch", type=int, required=True)
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--cache-bytes", type=int, required=True)
arguments = parser.parse_args()
torch.set_num_threads(1)

data = Dataset(
    arguments.shards,
    width=arguments.side,
    height=arguments.side,
    channels=arguments.channels,
    cache_bytes=arguments.cache_bytes,
)
began_cpu_s, began_s, samples = cpu_s(), time.perf_counter(), 0
with Loader(
    data, seed=0, global_batch=arguments.batch, rank=0, world_size=1, start_step=0, end_step=arguments.steps
) as loader:
    for batch in loader:
        assert batch.pixels is not None
        assert batch.pixels.shape[:2] == (arguments.batch, arguments.channels)
        samples += len(batch.captions)
took = {"cpu_s": cpu_s() - began_cpu_s, "wall_s": time.perf_counter() - began_s}
print(json.dumps({"samples": samples, **took}))
