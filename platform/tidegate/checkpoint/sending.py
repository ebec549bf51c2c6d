"""The process that brings committed checkpoints to the object store, beside training and behind it in every queue.

One at a time, and the newest first: where two were committed while one was on its way, the older of them is left out.
What is to be sent has a mark `sending` in its folder, so that retention leaves it there, and so that a run which was
killed in the middle goes on with it when it is back. Names of checkpoints come in as lines, lines of JSON go out.

When its input ends it ends at once: what it was sending is marked still, and what has arrived is not sent again.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tidegate.checkpoint.address import parse_address
from tidegate.checkpoint.errand import Delivered, Errand
from tidegate.checkpoint.manifest import parse_name
from tidegate.checkpoint.marks import KEEPS, Mark, clear_mark
from tidegate.checkpoint.object_store import ObjectStore, Patience
from tidegate.checkpoint.places import DiskPlace, marked
from tidegate.checkpoint.retention import Seen, doomed
from tidegate.checkpoint.scrub import State, look
from tidegate.checkpoint.tiers import Candidate
from tidegate.checkpoint.upload import send
from tidegate.errors import CheckpointError


class Wanted:
    """The newest checkpoint that is to be sent."""

    def __init__(self, disk: DiskPlace) -> None:
        self._disk = disk
        self._changed = threading.Condition()
        self._newest: Candidate | None = None

    def offer(self, candidate: Candidate) -> None:
        """Have it sent, unless a newer one comes before its turn."""
        with self._changed:
            self._newest = max(candidate, self._newest or candidate)
            self._changed.notify()

    def take(self) -> Candidate:
        """Wait for one. Older ones that are marked are given up: it takes their place."""
        with self._changed:
            while self._newest is None:
                self._changed.wait()
            taken, self._newest = self._newest, None
        for candidate in marked(self._disk, Mark.SENDING):
            if candidate < taken:
                self._disk.unmark(candidate, Mark.SENDING)
        return taken


def deliver(
    disk: DiskPlace, store: ObjectStore, candidate: Candidate, *, keep: int | None, generation: int
) -> Delivered:
    """Send one, and delete from the store what is too old then."""
    began = time.perf_counter()
    try:
        sent = send(disk, store, candidate)
        clear_mark(disk.checkpoints / candidate.name, Mark.SENDING)
    except (CheckpointError, OSError) as error:
        return Delivered(name=candidate.name, error=" ".join(str(error).split()), took_s=time.perf_counter() - began)
    took_s = time.perf_counter() - began
    done = Delivered(name=candidate.name, sent_bytes=sent.sent_bytes, there_bytes=sent.there_bytes, took_s=took_s)
    try:
        return done.model_copy(update={"removed": retire(store, keep, generation)})
    except CheckpointError as error:
        return done.model_copy(update={"not_removed": " ".join(str(error).split())})


def retire(store: ObjectStore, keep: int | None, generation: int) -> tuple[str, ...]:
    """Delete good ones beyond the newest `keep`, and what was cut short before them; the names.

    What a newer generation has begun it may be sending still: left alone. What is committed and bad is left to a
    person (`tidegate checkpoint prune`): it may be another run's, and nothing depends on its room.
    """
    if keep is None:
        return ()
    seen = {
        Seen(
            found.candidate.step,
            found.candidate.generation,
            good=found.state is State.GOOD,
            kept=found.state is State.BAD or bool(KEEPS & found.marks.keys()),
        ): found
        for found in look(store)
    }
    gone = [item for item in doomed(list(seen), keep) if item.good or item.generation <= generation]
    for item in gone:
        store.remove(seen[item].candidate)
    return tuple(seen[item].candidate.name for item in gone)


def serve(errand: Errand, say: Callable[[str], None]) -> None:
    """Send what is wanted, for ever."""
    disk = DiskPlace(Path(errand.checkpoints))
    patience = Patience(attempts=errand.attempts)
    store = ObjectStore(parse_address(errand.store), errand.endpoint, run=errand.run, patience=patience)
    wanted = Wanted(disk)
    threading.Thread(target=_listen, args=(wanted,), daemon=True).start()
    while True:
        candidate = wanted.take()
        say(deliver(disk, store, candidate, keep=errand.keep, generation=errand.generation).model_dump_json())


def _listen(wanted: Wanted) -> None:
    for line in sys.stdin:
        parsed = parse_name(line.strip())
        if parsed is not None:
            wanted.offer(Candidate(*parsed))
    os._exit(0)


def _give_way() -> None:
    """Behind training at the CPUs; at disks too, where the kernel knows such a thing."""
    os.nice(15)
    set_priority = {"x86_64": 251, "aarch64": 30}.get(os.uname().machine)  # ioprio_set has no wrapper
    if set_priority is not None:
        this_process, idle = 1, 3 << 13
        ctypes.CDLL(None).syscall(set_priority, this_process, 0, idle)


def main() -> None:
    # Only what we say may stand on the standard output, whatever libraries print.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    _give_way()

    def say(line: str) -> None:
        out.write(line + "\n")

    serve(Errand.model_validate_json(sys.argv[1]), say)


if __name__ == "__main__":
    main()
