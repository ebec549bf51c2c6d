"""Copies of a rank's part in shared memory: what a save writes from, and what outlives the rank that made it.

    /dev/shm/tidegate/digits-1f0c9a2e/<node>/   one run on one node
      lock                                      held by whoever lives from this folder; free: leftovers of the dead
      0.a  0.b                                  two copies for the node's first rank, in turn
      0.a.json                                  what `0.a` holds: written last, and removed before `0.a` changes
      held/<other node>/0.a …                   copies of another node's ranks, whose buddy this node is

A copy is sealed once its hashes are known: then its `.json` appears, a manifest of this one shard. Two copies in turn
mean that one which is being changed never takes the place of the last good one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from tidegate.checkpoint.manifest import Manifest

SHARED_MEMORY = Path("/dev/shm/tidegate")

HELD = "held"
"""Below it is what a node keeps for others, a folder for each."""

NODE = "TIDEGATE_NODE"
"""Environment variable with the node's name."""

SHELVES, SHELF_SECRET = "TIDEGATE_SHELVES", "TIDEGATE_SHELF_SECRET"
"""Environment variables: where the other nodes' agents lend theirs (`address:port` each), and the run's secret."""

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


def seal_of(copy: Path) -> Path:
    """The file that says what a copy holds."""
    return copy.with_name(f"{copy.name}.json")


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
