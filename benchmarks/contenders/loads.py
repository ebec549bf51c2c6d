"""Restores of the state of `saves.py`, in a process of their own; seconds of each are the last line, as JSON.

python -m benchmarks.contenders.loads --folder DIR

Everybody fills tensors that are warm. Files are put out of the page cache before they are read.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from benchmarks.contenders.raw_files import read_direct
from benchmarks.contenders.saves import LAYERS, WIDTH, about, memcpy_seconds, only_rank
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from tidegate.checkpoint.disk import Saver
from tidegate.checkpoint.folders import SlotFolder
from tidegate.checkpoint.layout import Part
from tidegate.checkpoint.memory import LocalShelf, Memory
from tidegate.checkpoint.restore import restore
from tidegate.checkpoint.ring import shared_ring
from tidegate.checkpoint.tiers import Disk, Tier

READS_OF_DISK = 4


@dataclass(frozen=True, slots=True)
class Took:
    """Of one round, in seconds; from disk the medians of `READS_OF_DISK`."""

    bytes: int
    disk_s: float
    memory_s: float
    dcp_s: float
    raw_s: float
    memcpy_s: float


def forget_pages(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def timed(what: Callable[[], object]) -> float:
    gc.collect()  # what others left is not its to clear
    began = time.perf_counter()
    what()
    return time.perf_counter() - began


def measure(folder: Path, width: int = WIDTH, layers: int = LAYERS) -> Took:
    state = {
        f"{kind}.{layer}": torch.randn(width, width)
        for layer in range(layers)
        for kind in ("model", "exp_avg", "exp_avg_sq")
    }
    want = {name: float(one.flatten()[-1]) for name, one in state.items()}
    parts = [Part(name, one, tuple(one.shape), (0, 0)) for name, one in state.items()]
    memory = SlotFolder(Path("/dev/shm/tidegate-bench") / str(os.getpid()))
    group = dist.new_group(backend="gloo")
    ring = shared_ring(memory, parts, rank=0, local_rank=0, newest=None)
    saver = Saver(folder / "ours", parts, group=group, generation=0, keep=1, ring=ring)
    saver.start(about(1))
    saver.finish()
    saver.close()
    dcp.save(dict(state), storage_writer=FileSystemWriter(str(folder / "dcp")))
    [shard] = (folder / "ours").rglob("*.safetensors")

    def from_tier(tier: Tier) -> Callable[[], None]:
        def read() -> None:
            found = restore([tier], parts, group)
            if found.manifest is None:
                raise RuntimeError(f"nothing restored: {found.skipped}")

        return read

    def checked(read: Callable[[], object]) -> float:
        for one in state.values():
            one.zero_()
        forget_pages(folder)
        took = timed(read)
        _check(state.items(), want)
        return took

    try:
        # In turn, each first as often as second: a disk's speed may change from one second to the next.
        reads = {
            "disk": lambda: checked(from_tier(Disk(folder / "ours"))),
            "raw": lambda: timed(lambda: read_direct(shard)),
        }
        took: dict[str, list[float]] = {name: [] for name in reads}
        for number in range(READS_OF_DISK):
            for name in sorted(reads, reverse=number % 2 == 1):
                took[name].append(reads[name]())
        return Took(
            bytes=sum(one.nbytes for one in state.values()),
            disk_s=statistics.median(took["disk"]),
            dcp_s=checked(lambda: dcp.load(dict(state), storage_reader=FileSystemReader(str(folder / "dcp")))),
            raw_s=statistics.median(took["raw"]),
            memory_s=checked(from_tier(Memory([LocalShelf(memory.path)]))),
            memcpy_s=memcpy_seconds(state),
        )
    finally:
        memory.let_go()
        memory.remove()
        shutil.rmtree(folder)


def _check(state: Sequence[tuple[str, Tensor]] | object, want: dict[str, float]) -> None:
    for name, one in dict(state).items():  # type: ignore[call-overload]
        if float(one.flatten()[-1]) != want[name]:
            raise RuntimeError(f"{name} is not what was saved")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    arguments = parser.parse_args()
    with only_rank(arguments.folder):
        took = measure(arguments.folder)
    print(json.dumps({name: getattr(took, name) for name in Took.__slots__}), flush=True)


if __name__ == "__main__":
    main()
