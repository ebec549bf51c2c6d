"""Saves beside training: an update waits for one copy in shared memory, others bring it to disk.

A thread copies while the next step computes, which only reads the weights; the step's update waits for the copy. The
copy is a checkpoint of its own while the node lives (see `slots.py`). The thread hashes it, the writer's process
(`writer.py`) writes it meanwhile, a second thread collects all ranks' receipts, and rank 0 commits.
"""

from __future__ import annotations

import errno
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from tidegate.checkpoint.files import sync_folder, write_synced
from tidegate.checkpoint.layout import Part, file_name
from tidegate.checkpoint.manifest import MANIFEST, Manifest, ShardSeen, folder_name, parse_name
from tidegate.checkpoint.marks import is_bad, is_kept
from tidegate.checkpoint.retention import Seen, doomed
from tidegate.checkpoint.ring import Ring
from tidegate.checkpoint.slots import Slot
from tidegate.checkpoint.writer import Writer
from tidegate.spec.policy import Model

_RECEIPT_BYTES = 768
_WHY_CHARACTERS = 160

WhenLate = Literal["wait", "skip"]
"""What a save does that is due while the one before is still being written."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a save ended. Rank 0 knows it of all ranks, the others of their own shard."""

    step: int
    stall_s: float = 0.0
    """How long training was blocked by it."""
    commit_s: float = 0.0
    """From the start of the save to the manifest's rename, and for other ranks to their shard being durable."""
    bytes: int = 0
    error: str | None = None
    """Why there is no checkpoint of this step, naming the rank; the last good one is still there."""
    full: bool = False
    """The disk was full. What could go, has gone: the next save may fit."""
    skipped: bool = False
    """It was never started: the one before was late."""


class _Receipt(Model):
    """What a rank tells rank 0 about its shard."""

    stall_s: float
    shard: ShardSeen | None = None
    error: str | None = None
    full: bool = False


@dataclass(slots=True)
class _Copy:
    made: Future[None]
    stall_s: float


class Saver:
    """Saves one rank's parts; one save in flight to disk. All ranks must start the same saves in the same order, and
    call `wait_copied` before they change the parts."""

    def __init__(
        self,
        checkpoints: Path,
        parts: Sequence[Part],
        *,
        group: dist.ProcessGroup,
        generation: int,
        keep: int,
        rotten: frozenset[str] = frozenset(),
        ring: Ring | None = None,
        when_late: WhenLate = "wait",
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`group` must be the saver's own. `rotten`: names of checkpoints that did not verify. `ring`: the copies in
        shared memory; without it there is one, which ends with this process."""
        self._checkpoints, self._group, self._generation, self._keep = checkpoints, group, generation, keep
        self._rotten, self._when_late, self._clock = rotten, when_late, clock
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        self._ring = ring or Ring(lambda _: Slot(parts, self._rank))
        self._writer: Writer | None = None
        self._waited_for = threading.Event()
        self._copier = ThreadPoolExecutor(max_workers=1, thread_name_prefix="copy")
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="save")
        self._copy: _Copy | None = None
        self._sealing: Future[ShardSeen] | None = None
        self._step = -1
        self._flight: Future[Outcome] | None = None

    @property
    def writer_pid(self) -> int | None:
        """The process that writes; None before the first save."""
        return self._writer.pid if self._writer is not None else None

    @property
    def in_flight(self) -> bool:
        """Whether a save is on its way to disk."""
        return self._flight is not None and not self._flight.done()

    def start(self, about: Manifest, *, to_disk: bool = True) -> Outcome | None:
        """Begin to copy the parts and to save them as `about`, whose list of files is filled in. Where it is to go to
        disk and the save before is in flight still, this waits for that and returns how it ended; or, if late saves are
        skipped, returns that, and there is only the copy in memory."""
        began = time.perf_counter()
        if to_disk and self.in_flight:
            self._hurry()
        sealed = self._sealed()
        before, late = self._why_unsealed(), False
        if to_disk and self._when_late == "wait":
            before = self.finish() or before
        if self._ring.two or self._when_late == "skip":
            unsealed, busy = self._anywhere(not sealed, self.in_flight)
            late = to_disk and busy
            if late and not self._ring.two:
                return _skipped(about.step)
            if not busy or unsealed:  # unsealed: of two copies only the one in flight is known to be whole
                before, busy = self.finish() or before, False
            slot = self._ring.take(last_is_good=not unsealed, busy=busy)
        else:
            slot = self._ring.take(last_is_good=False, busy=False)
        slot.mark()
        copy = _Copy(self._copier.submit(slot.fill), stall_s=0.0)
        self._sealing, self._step = self._copier.submit(_seal, slot, about, copy.made), about.step
        self._copy = copy
        copy.stall_s = time.perf_counter() - began
        if not to_disk:
            return before
        if late:
            return _skipped(about.step)
        self._ring.written(slot)
        self._waited_for.clear()
        self._flight = self._thread.submit(self._save, about, slot, copy, self._sealing, began)
        return before

    @property
    def copying(self) -> bool:
        """Whether `wait_copied` would wait."""
        return self._copy is not None and not self._copy.made.done()

    def wait_copied(self) -> None:
        """Return when the parts may change."""
        if self._copy is not None:
            began = time.perf_counter()
            self._copy.made.result()
            self._copy.stall_s += time.perf_counter() - began
            self._copy = None

    def poll(self) -> Outcome | None:
        """How the save in flight ended, once; None while it flies or where there is none."""
        return self.finish() if self._flight is not None and self._flight.done() else None

    def finish(self) -> Outcome | None:
        """Wait for the save in flight; how it ended, None where there is none."""
        if self._flight is None:
            return None
        flight, self._flight = self._flight, None
        if not flight.done():
            self._hurry()
        return flight.result()

    def _hurry(self) -> None:
        """What is in flight is waited for. Whichever comes first, this or the file's begin: the writer is told."""
        self._waited_for.set()
        writer = self._writer
        if writer is not None:
            writer.hurry()

    def close(self) -> None:
        self._copier.shutdown(wait=True)
        self._thread.shutdown(wait=True)
        self._end_writer()
        self._ring.close()

    def _sealed(self) -> bool:
        """Whether the last copy is whole in memory: waits for its hashes, which take no longer than the copy."""
        return self._sealing is not None and self._sealing.exception() is None

    def _why_unsealed(self) -> Outcome | None:
        """How the last copy failed, where it was for memory alone; of the others a save to disk tells."""
        error = self._sealing.exception() if self._sealing is not None and self._flight is None else None
        return Outcome(step=self._step, error=f"copy in memory: {error}") if error is not None else None

    def _anywhere(self, *flags: bool) -> tuple[bool, ...]:
        """Each flag, OR-ed over all ranks: they take the same copy in turn, so that what is whole is so everywhere."""
        facts = torch.tensor(flags, dtype=torch.int32)
        dist.all_reduce(facts, op=dist.ReduceOp.MAX)
        return tuple(bool(fact) for fact in facts.tolist())

    # In the thread that saves

    def _save(self, about: Manifest, slot: Slot, copy: _Copy, sealing: Future[ShardSeen], began: float) -> Outcome:
        folder = self._checkpoints / folder_name(about.step, self._generation)
        receipts = self._gathered(self._written(folder, slot, copy, sealing))
        error = "; ".join(receipt.error for receipt in receipts if receipt.error) or None
        full = any(receipt.full for receipt in receipts)
        shards = tuple(receipt.shard for receipt in receipts if receipt.shard is not None)
        if self._rank == 0 and error is None:
            error, full = self._commit(folder, about.model_copy(update={"files": shards, "at_s": self._clock()}))
        if self._rank == 0 and full:
            shutil.rmtree(folder, ignore_errors=True)  # all ranks are done with it
            self._retire(keep=1)
        return Outcome(
            step=about.step,
            stall_s=max(receipt.stall_s for receipt in receipts),
            commit_s=time.perf_counter() - began,
            bytes=sum(shard.bytes for shard in shards),
            error=error,
            full=full,
        )

    def _written(self, folder: Path, slot: Slot, copy: _Copy, sealing: Future[ShardSeen]) -> _Receipt:
        copy.made.result()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if (folder / MANIFEST).exists():
                raise FileExistsError(
                    errno.EEXIST, "committed before; a restart must raise the generation", str(folder)
                )
            if self._writer is None:
                self._writer = Writer()
            layout = slot.layout
            self._writer.begin(slot.handle, layout.size, len(layout.template), folder / file_name(self._rank))
            if self._waited_for.is_set():
                self._writer.hurry()
            shard = sealing.result()
            self._writer.end()
            return _Receipt(stall_s=copy.stall_s, shard=shard)
        except OSError as error:
            if sealing.exception() is not None or error.errno == errno.EPIPE:
                self._end_writer()
            why = f"rank {self._rank}: {error.strerror}: {error.filename or folder}"
            return _Receipt(stall_s=copy.stall_s, error=why[:_WHY_CHARACTERS], full=error.errno == errno.ENOSPC)

    def _end_writer(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

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

    def _commit(self, folder: Path, manifest: Manifest) -> tuple[str | None, bool]:
        """Why it failed, if it did, and whether the disk was full."""
        try:
            sync_folder(folder)
            sync_folder(self._checkpoints)
            write_synced(folder / MANIFEST, manifest.model_dump_json(indent=1).encode() + b"\n")
        except OSError as error:
            return f"manifest: {error.strerror}: {error.filename or folder}", error.errno == errno.ENOSPC
        self._retire(self._keep)
        return None, False

    def _retire(self, keep: int) -> None:
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
        for seen in doomed(list(paths), keep):
            # The manifest goes first: a deletion that is cut short leaves no half checkpoint that looks whole.
            (paths[seen] / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(paths[seen], ignore_errors=True)


def _seal(slot: Slot, about: Manifest, copied: Future[None]) -> ShardSeen:
    copied.result()  # what could not be copied is not sealed
    return slot.seal(about)


def _skipped(step: int) -> Outcome:
    return Outcome(step=step, error="the save before is still being written", skipped=True)
