"""One contender's saves in a real training loop, in a process of its own; what they took is its last line, as JSON.

python -m benchmarks.contenders.saves --contender ours --measure stall --folder DIR

A stack of linear layers with AdamW: 2.06 GiB of weights and moments, of which each step changes every byte. One rank
and one thread of arithmetic on two cores: as beside a GPU, there is a core for what runs in the background.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from benchmarks.contenders.raw_files import write_direct
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from tidegate.checkpoint.disk import Saver
from tidegate.checkpoint.files import sync_tree
from tidegate.checkpoint.folders import SlotFolder
from tidegate.checkpoint.layout import Part
from tidegate.checkpoint.manifest import Manifest
from tidegate.checkpoint.ring import shared_ring
from tidegate.ports import free_port

WIDTH, LAYERS, BATCH = 4096, 11, 64
IDLE_STEPS = 3
SAVES = 2


class Loop:
    """Training that never ends."""

    def __init__(self, width: int = WIDTH, layers: int = LAYERS, batch: int = BATCH) -> None:
        torch.manual_seed(0)
        self.network = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=1e-4)
        self.batch = torch.randn(batch, width)
        self.step()

    def step(self, before_update: Callable[[], None] = lambda: None) -> float:
        """One step; its seconds. `before_update` is called when the weights are about to change."""
        began = time.perf_counter()
        self.network(self.batch).square().mean().backward()
        before_update()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - began

    def state(self) -> dict[str, Tensor]:
        found = {}
        for name, parameter in self.network.named_parameters():
            moments = self.optimizer.state[parameter]
            found[f"model.{name}"] = parameter.detach()
            found |= {f"{kind}.{name}": moments[kind] for kind in ("exp_avg", "exp_avg_sq")}
        return found

    def parts(self) -> list[Part]:
        return [Part(name, one, tuple(one.shape), (0,) * one.dim()) for name, one in self.state().items()]


def about(step: int) -> Manifest:
    return Manifest(
        run="bench", generation=0, step=step, updates=step, seed=0, global_batch=1, dataset="", world_size=1
    )


class Contender(Protocol):
    """Saves what a loop holds. Blocking calls are the stall."""

    def start(self, number: int) -> None:
        """Return when training may go on."""
        ...

    def before_update(self) -> None:
        """Return when the weights may change."""
        ...

    def is_done(self) -> bool: ...

    def wait(self) -> None:
        """Until it is durable."""
        ...

    def close(self) -> None: ...


class Ours:
    def __init__(self, loop: Loop, folder: Path) -> None:
        parts = loop.parts()
        self._memory = SlotFolder(Path("/dev/shm/tidegate-bench") / str(os.getpid()))
        ring = shared_ring(self._memory, parts, rank=0, local_rank=0, newest=None)
        group = dist.new_group(backend="gloo")
        self._saver = Saver(folder, parts, group=group, generation=0, keep=1, ring=ring)

    def start(self, number: int) -> None:
        self._saver.start(about(number))

    def before_update(self) -> None:
        self._saver.wait_copied()

    def is_done(self) -> bool:
        return not self._saver.in_flight

    def wait(self) -> None:
        outcome = self._saver.finish()
        if outcome is None or outcome.error is not None:
            raise RuntimeError(f"our save failed: {outcome}")

    def close(self) -> None:
        self._saver.close()
        self._memory.let_go()
        self._memory.remove()


class Dcp:
    """`async_save`, as documented: by a thread or a process, staging into memory of its own or shared."""

    def __init__(
        self, loop: Loop, folder: Path, kind: AsyncCheckpointerType, options: StagingOptions | None = None
    ) -> None:
        self._loop, self._folder, self._kind = loop, folder, kind
        self._stager = DefaultStager(options) if options is not None else None
        self._group = dist.new_group(backend="gloo")
        self._saving: Any = None

    def start(self, number: int) -> None:
        self._path = self._folder / f"dcp-{number}"
        self._saving = dcp.async_save(
            self._loop.state(),
            storage_writer=FileSystemWriter(str(self._path), thread_count=2),
            async_checkpointer_type=self._kind,
            async_stager=self._stager,
            process_group=self._group,
        )

    def before_update(self) -> None:
        staged = getattr(self._saving, "staging_completion", None)
        if staged is not None:
            staged.result()

    def is_done(self) -> bool:
        return bool(self._upload().done())

    def wait(self) -> None:
        self._upload().result()
        shutil.rmtree(self._path)

    def _upload(self) -> Any:
        return getattr(self._saving, "upload_completion", self._saving)

    def close(self) -> None:
        if self._stager is not None:
            self._stager.close()


class TorchSnapshot:
    def __init__(self, loop: Loop, folder: Path) -> None:
        from torchsnapshot import Snapshot, StateDict  # type: ignore[import-not-found]

        self._loop, self._folder = loop, folder
        self._take, self._dict = Snapshot.async_take, StateDict

    def start(self, number: int) -> None:
        self._path = self._folder / f"snapshot-{number}"
        self._pending = self._take(str(self._path), {"state": self._dict(**self._loop.state())})

    def before_update(self) -> None: ...

    def is_done(self) -> bool:
        return bool(self._pending.done())

    def wait(self) -> None:
        self._pending.wait()
        shutil.rmtree(self._path)

    def close(self) -> None: ...


class RawBeside:
    """As many bytes as ours writes, by direct I/O in a thread beside the steps: with no copy, no hash and no commit."""

    def __init__(self, loop: Loop, folder: Path) -> None:
        self._count, self._path = sum(one.nbytes for one in loop.state().values()), folder / "raw"
        self._thread = ThreadPoolExecutor(1)

    def start(self, number: int) -> None:
        self._writing = self._thread.submit(write_direct, self._path, self._count)

    def before_update(self) -> None: ...

    def is_done(self) -> bool:
        return self._writing.done()

    def wait(self) -> None:
        self._writing.result()
        self._path.unlink()

    def close(self) -> None:
        self._thread.shutdown()


class Blocking:
    """A save that training waits for."""

    def __init__(self, loop: Loop, folder: Path, save: Callable[[Mapping[str, Tensor], Path], None]) -> None:
        self._loop, self._folder, self._save = loop, folder, save

    def start(self, number: int) -> None:
        path = self._folder / f"save-{number}"
        self._save(self._loop.state(), path)
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    def before_update(self) -> None: ...

    def is_done(self) -> bool:
        return True

    def wait(self) -> None: ...

    def close(self) -> None: ...


def _dcp_default(state: Mapping[str, Tensor], path: Path) -> None:
    dcp.save(dict(state), storage_writer=FileSystemWriter(str(path)))


def _safetensors(state: Mapping[str, Tensor], path: Path) -> None:
    path.mkdir()
    save_file(dict(state), path / "state.safetensors")
    sync_tree(path)


def _raw(loop: Loop, folder: Path) -> Contender:
    """As many bytes of warm memory, by direct I/O in the streams that are fastest here."""
    count = sum(one.nbytes for one in loop.state().values())
    return Blocking(loop, folder, lambda _, path: write_direct(path, count))


_SHARED = {"use_pinned_memory": False, "use_non_blocking_copy": False}

CONTENDERS: Mapping[str, Callable[[Loop, Path], Contender]] = {
    "ours": Ours,
    "dcp_thread": lambda loop, folder: Dcp(loop, folder, AsyncCheckpointerType.THREAD),
    "dcp_process": lambda loop, folder: Dcp(loop, folder, AsyncCheckpointerType.PROCESS),
    "dcp_process_shared": lambda loop, folder: Dcp(
        loop,
        folder,
        AsyncCheckpointerType.PROCESS,
        StagingOptions(use_shared_memory=True, use_async_staging=False, **_SHARED),
    ),
    "dcp_process_shared_async": lambda loop, folder: Dcp(
        loop,
        folder,
        AsyncCheckpointerType.PROCESS,
        StagingOptions(use_shared_memory=True, use_async_staging=True, **_SHARED),
    ),
    "torchsnapshot": TorchSnapshot,
    "dcp_default": lambda loop, folder: Blocking(loop, folder, _dcp_default),
    "safetensors": lambda loop, folder: Blocking(loop, folder, _safetensors),
    "raw": _raw,
    "raw_beside": RawBeside,
}


def memcpy_seconds(state: Mapping[str, Tensor]) -> float:
    source = list(state.values())
    target = [torch.zeros_like(one) for one in source]
    torch._foreach_copy_(target, source)
    took = []
    for _ in range(3):
        began = time.perf_counter()
        torch._foreach_copy_(target, source)
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def measure_stall(contender: Contender, loop: Loop, saves: int = SAVES) -> dict[str, float]:
    """Medians of saves beside training, after one that warms up.

    `stall_s`: what training waits for one. `slowdown`: 1 + what steps took longer while it drained, per second of
    draining. `drained_s`: how long that was. `memcpy_s`: to copy the state into memory that is warm."""
    stalls, slowdowns, drains = [], [], []
    memcpy_s = memcpy_seconds(loop.state())
    idle_s = statistics.median(loop.step() for _ in range(IDLE_STEPS))
    for number in range(saves + 1):
        os.sync()  # what others left dirty is not ours to wait for
        idle_s = statistics.median((idle_s, *(loop.step() for _ in range(IDLE_STEPS - 1))))
        waited = [0.0]

        def before_update(waited: list[float] = waited) -> None:
            began = time.perf_counter()
            contender.before_update()
            waited[0] += time.perf_counter() - began

        began = time.perf_counter()
        contender.start(number)
        stall_s = time.perf_counter() - began
        steps, drained_s = [], None
        while drained_s is None:
            steps.append(loop.step(before_update))
            if contender.is_done():
                contender.wait()
                drained_s = time.perf_counter() - began - stall_s
        if number:
            stalls.append(stall_s + waited[0])
            # A step that was under way when the save ended counts whole: its excess is the save's all the same.
            excess_s = sum(steps) - waited[0] - len(steps) * idle_s
            slowdowns.append(1 + excess_s / drained_s)
            drains.append(drained_s)
    return {
        "idle_step_s": idle_s,
        "memcpy_s": memcpy_s,
        "stall_s": statistics.median(stalls),
        "slowdown": statistics.median(slowdowns),
        "drained_s": statistics.median(drains),
    }


def measure_durable(contender: Contender, loop: Loop, saves: int = SAVES) -> dict[str, float]:
    """Median of saves with nothing beside them, after one that warms up: seconds until one is durable, and its size."""
    durables = []
    for number in range(saves + 1):
        os.sync()
        began = time.perf_counter()
        contender.start(number)
        contender.before_update()
        contender.wait()
        if number:
            durables.append(time.perf_counter() - began)
    return {"bytes": sum(one.nbytes for one in loop.state().values()), "durable_s": statistics.median(durables)}


MEASURES = {"stall": measure_stall, "durable": measure_durable}


@contextlib.contextmanager
def only_rank(folder: Path) -> Iterator[None]:
    """A process group of one, and the folder that it works in."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    dist.init_process_group("gloo")
    folder.mkdir(parents=True, exist_ok=True)
    yield
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contender", choices=sorted(CONTENDERS), required=True)
    parser.add_argument("--measure", choices=sorted(MEASURES), required=True)
    parser.add_argument("--folder", type=Path, required=True)
    arguments = parser.parse_args()
    with only_rank(arguments.folder):
        loop = Loop()
        contender = CONTENDERS[arguments.contender](loop, arguments.folder)
        took = MEASURES[arguments.measure](contender, loop)
        contender.close()
    print(json.dumps(took), flush=True)


if __name__ == "__main__":
    main()
