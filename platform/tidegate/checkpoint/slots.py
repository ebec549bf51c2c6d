"""Copies of a rank's part in shared memory: what a save writes from, and what outlives the rank that made it.

    /dev/shm/tidegate/digits-1f0c9a2e/<node>/   one run on one node
      lock                                      held by whoever lives from this folder; free: leftovers of the dead
      0.a  0.b                                  two copies for the node's first rank, in turn
      0.a.json                                  what `0.a` holds: written last, and removed before `0.a` changes

A copy is sealed once its hashes are known: then its `.json` appears, a manifest of this one shard. Two copies in turn
mean that one which is being changed never takes the place of the last good one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import mmap
import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from tidegate.checkpoint.files import write_renamed
from tidegate.checkpoint.layout import Layout, Part, file_name, laid_out
from tidegate.checkpoint.manifest import Manifest, ShardSeen
from tidegate.checkpoint.sums import block_sums, sum_of

SHARED_MEMORY = Path("/dev/shm/tidegate")

HELD = "held"
"""Below it is what a node keeps for others, a folder for each."""

NODE = "TIDEGATE_NODE"
"""Environment variable with the node's name."""

LEFT_AFTER_S = 600.0
"""A folder that nobody lives from is a dead run's after so long: a run's next generation starts sooner."""

_LOCK = "lock"
_SPARE_BYTES = 64 << 20
"""Of shared memory, left to others: Ray, torch's loaders and NCCL live there too."""


def folder_of(run: str, run_dir: Path, environment: Mapping[str, str]) -> Path:
    """Where a run's copies are on this node, whose name the gang gives; without a gang it is the machine's."""
    key = hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:8]  # two runs may share a name
    node = re.sub(r"[^A-Za-z0-9_.-]", "_", environment.get(NODE) or os.uname().nodename)
    return SHARED_MEMORY / f"{run}-{key}" / node


def room_problem(paths: Sequence[Path], each_bytes: int) -> str | None:
    """Why copies of this size at `paths`, where older ones may be, would not fit into shared memory; None: they do."""
    there = sum(path.stat().st_blocks * 512 for path in paths if path.exists())
    room = os.statvfs(paths[0].parent)
    free, wanted = room.f_bavail * room.f_frsize, len(paths) * each_bytes - there
    if wanted + _SPARE_BYTES <= free:
        return None
    return f"{paths[0].parent}: {wanted} bytes wanted, and {_SPARE_BYTES} for others; {free} are free"


class SlotFolder:
    """A run's folder on this node."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    def hold(self) -> None:
        """Make it, and show that somebody lives from it until this process ends or lets go."""
        self.path.mkdir(parents=True, exist_ok=True)
        if self._lock is None:
            self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_SH)

    def let_go(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def sealed(self) -> dict[Path, Manifest]:
        """What whole copies are here. One that cannot be read is none."""
        found = {}
        with contextlib.suppress(OSError):
            for path in self.path.glob("*.json"):
                with contextlib.suppress(OSError, ValueError):
                    found[path.with_suffix("")] = Manifest.model_validate_json(path.read_bytes())
        return found

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.path.parent.rmdir()  # where no other node's is left


def remove_leftovers(root: Path, now_s: float, *, spare: Path | None = None) -> list[Path]:
    """Remove folders of dead runs on this machine; which those were."""
    removed = []
    for folder in root.glob("*/*"):
        with contextlib.suppress(OSError):
            newest_s = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
            if folder != spare and now_s - newest_s > LEFT_AFTER_S and not _is_held(folder):
                SlotFolder(folder).remove()
                removed.append(folder)
    return removed


def _is_held(folder: Path) -> bool:
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


class Slot:
    """One copy of a rank's parts, in the layout of its file."""

    def __init__(self, parts: Sequence[Part], rank: int, path: Path | None = None) -> None:
        """At `path` in shared memory, whatever stands there; without one in memory that ends with the process.

        Raises:
            OSError: there is no room for it, or a rank of an older generation isn't dead yet.
        """
        self.path = path
        self.layout = laid_out(parts)
        self._rank = rank
        self._source = [part.local for part in parts]
        self.handle = self._opened(self.layout)
        populate = mmap.MAP_SHARED | mmap.MAP_POPULATE  # its pages exist before the first save
        self._memory = memoryview(mmap.mmap(self.handle, self.layout.padded_bytes, flags=populate))
        self._body = self._memory[len(self.layout.template) : self.layout.size]
        whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._copy = [_view(whole, self.layout, part) for part in parts]

    def _opened(self, layout: Layout) -> int:
        if self.path is None:
            handle = os.memfd_create("tidegate-save")
        else:
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(handle)
                raise OSError(errno.EBUSY, f"{self.path}: another rank lives from it") from None
            self._seal_path.unlink(missing_ok=True)
        os.ftruncate(handle, layout.padded_bytes)
        # Without it a full file system would end us by a signal at the first touch.
        os.posix_fallocate(handle, 0, layout.padded_bytes)
        return handle

    @property
    def _seal_path(self) -> Path:
        assert self.path is not None
        return self.path.with_name(f"{self.path.name}.json")

    def fill(self) -> None:
        """Copy what the parts hold now. When it returns the parts may change."""
        if self.path is not None:
            self._seal_path.unlink(missing_ok=True)
        if self._source:
            torch._foreach_copy_(self._copy, self._source)

    def seal(self, about: Manifest) -> ShardSeen:
        """Hash the copy, complete its header, and say what it is: of the checkpoint `about`.

        Raises:
            OSError: shared memory's own.
        """
        layout = self.layout
        header = layout.header(block_sums(self._body, layout.block_bytes))
        self._memory[: len(header)] = header
        shard = ShardSeen(
            name=file_name(self._rank), bytes=layout.size, header_bytes=len(header), xxh3_128=sum_of(header)
        )
        if self.path is not None:
            manifest = about.model_copy(update={"files": (shard,), "at_s": time.time()})
            write_renamed(self._seal_path, manifest.model_dump_json().encode())
        return shard

    def close(self) -> None:
        os.close(self.handle)


def _view(whole: torch.Tensor, layout: Layout, part: Part) -> torch.Tensor:
    begin = len(layout.template) + layout.begins[part.name]
    return whole[begin : begin + part.local.nbytes].view(part.local.dtype).view(part.local.shape)
