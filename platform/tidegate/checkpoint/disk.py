"""Save to disk beside training: the step waits for one copy in memory, a thread does the rest."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from tidegate.checkpoint.files import FileSeen, sync_folder, write_synced
from tidegate.checkpoint.manifest import MANIFEST, Manifest, folder_name, parse_name
from tidegate.checkpoint.marks import is_bad, is_kept
from tidegate.checkpoint.retention import Seen, doomed
from tidegate.checkpoint.shards import Part, Stage, file_name
from tidegate.spec.policy import Model

_RECEIPT_BYTES = 512


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a save ended. Rank 0 knows it of all ranks, the others of their own shard."""

    step: int
    stall_s: float
    """How long training was blocked by it."""
    commit_s: float
    """From the start of the save to the manifest's rename, and for other ranks to their shard being durable."""
    bytes: int
    error: str | None = None
    """Why there is no checkpoint of this step, naming the rank; the last good one is still there."""


class _Receipt(Model):
    """What a rank tells rank 0 about its shard."""

    stall_s: float
    file: FileSeen | None = None
    error: str | None = None


class Saver:
    """Saves one rank's parts, one save in flight. All ranks must start the same saves in the same order."""

    def __init__(
        self,
        checkpoints: Path,
        parts: Sequence[Part],
        *,
        group: dist.ProcessGroup,
        generation: int,
        keep: int,
        rotten: frozenset[str] = frozenset(),
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`group` must be the saver's own. `rotten`: names of checkpoints that did not verify."""
        self._checkpoints, self._group, self._generation, self._keep = checkpoints, group, generation, keep
        self._rotten, self._clock = rotten, clock
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        self._stage = Stage(parts)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="save")
        self._flight: Future[Outcome] | None = None

    def start(self, about: Manifest) -> Outcome | None:
        """Copy the parts and begin to save them as `about`, whose list of files is filled in. Where the save before
        is still in flight this waits for it and returns how it ended."""
        began = time.perf_counter()
        before = self.finish()
        self._stage.fill()
        stall_s = time.perf_counter() - began
        self._flight = self._thread.submit(self._save, about, began, stall_s)
        return before

    def poll(self) -> Outcome | None:
        """How the save in flight ended, once; None while it flies or where there is none."""
        return self.finish() if self._flight is not None and self._flight.done() else None

    def finish(self) -> Outcome | None:
        """Wait for the save in flight; how it ended, None where there is none."""
        if self._flight is None:
            return None
        flight, self._flight = self._flight, None
        return flight.result()

    def close(self) -> None:
        self._thread.shutdown(wait=True)

    def _save(self, about: Manifest, began: float, stall_s: float) -> Outcome:
        folder = self._checkpoints / folder_name(about.step, self._generation)
        mine = self._write_shard(folder, stall_s)
        receipts = self._gathered(mine)
        error = "; ".join(receipt.error for receipt in receipts if receipt.error) or None
        files = tuple(receipt.file for receipt in receipts if receipt.file is not None)
        if self._rank == 0 and error is None:
            error = self._commit(folder, about.model_copy(update={"files": files, "at_s": self._clock()}))
        return Outcome(
            step=about.step,
            stall_s=max(receipt.stall_s for receipt in receipts),
            commit_s=time.perf_counter() - began,
            bytes=sum(file.bytes for file in files),
            error=error,
        )

    def _write_shard(self, folder: Path, stall_s: float) -> _Receipt:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return _Receipt(stall_s=stall_s, file=self._stage.write(folder / file_name(self._rank)))
        except OSError as error:
            why = f"rank {self._rank}: {error.strerror}: {error.filename or folder}"
            return _Receipt(stall_s=stall_s, error=why[: _RECEIPT_BYTES // 4])

    def _gathered(self, mine: _Receipt) -> list[_Receipt]:
        """Every rank's receipt on rank 0, elsewhere this rank's alone. One small message a rank."""
        message = torch.zeros(_RECEIPT_BYTES, dtype=torch.uint8)
        raw = mine.model_dump_json().encode()
        message[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        if self._rank:
            dist.gather(message, group_dst=0, group=self._group)
            return [mine]
        messages = [torch.empty_like(message) for _ in range(self._world_size)]
        dist.gather(message, messages, group_dst=0, group=self._group)
        return [_Receipt.model_validate_json(bytes(received.numpy()).rstrip(b"\0")) for received in messages]

    def _commit(self, folder: Path, manifest: Manifest) -> str | None:
        try:
            sync_folder(folder)
            sync_folder(self._checkpoints)
            write_synced(folder / MANIFEST, manifest.model_dump_json(indent=1).encode() + b"\n")
        except OSError as error:
            return f"manifest: {error.strerror}: {error.filename or folder}"
        self._retire()
        return None

    def _retire(self) -> None:
        here = [(parse_name(path.name), path) for path in self._checkpoints.iterdir()]
        paths = {
            Seen(
                *name,
                good=path.name not in self._rotten and (path / MANIFEST).exists() and not is_bad(path),
                kept=is_kept(path),
            ): path
            for name, path in here
            if name is not None
        }
        for seen in doomed(list(paths), self._keep):
            # The manifest goes first: a deletion that is cut short leaves no half checkpoint that looks whole.
            (paths[seen] / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(paths[seen], ignore_errors=True)
