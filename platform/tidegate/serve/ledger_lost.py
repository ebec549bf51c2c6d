"""Rows that a killed gateway left open: whoever starts next on the folder closes them, and says so.

A living ledger holds a lock on `GATEWAY.lock`. The kernel lets go of it when the process ends, however it ends; a clean
end takes the file away. So a lock that can be had stands for a gateway that was killed.
"""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

LOST = "lost by gateway: it was killed with this under way; a client got no answer, a job is made again"

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Life:
    """Held for as long as a ledger is written."""

    path: Path
    descriptor: int | None
    """None: another ledger of this name is written."""

    @classmethod
    def begin(cls, folder: Path, gateway: str) -> Life:
        path = folder / f"{gateway}.lock"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        return cls(path, descriptor if _try_lock(descriptor) else None)

    def end(self) -> None:
        if self.descriptor is not None:
            self.path.unlink(missing_ok=True)
            os.close(self.descriptor)


def close_lost(folder: Path, *own: Life) -> int:
    """Close the rows that dead gateways left open in `folder`, and those of earlier lives of `own`; how many."""
    closed = 0
    for path in sorted(folder.glob("*.lock")):
        mine = any(life.path == path and life.descriptor is not None for life in own)
        with _locked(path, mine=mine) as is_dead:
            if is_dead:
                lost = sum(map(_close, _files(folder, path.stem)))
                closed += lost
                if lost:
                    _LOG.warning("ledger: %d requests of %s: %s", lost, path.stem, LOST)
                if not mine:
                    path.unlink(missing_ok=True)
    return closed


def _files(folder: Path, gateway: str) -> list[Path]:
    return sorted((*folder.glob(f"{gateway}.sqlite"), *folder.glob(f"{gateway}.[0-9]*.sqlite")))


def _close(file: Path) -> int:
    try:
        with closing(sqlite3.connect(file, timeout=5.0)) as db, db:
            return db.execute(
                "UPDATE requests SET outcome = 'lost', reason = ? WHERE outcome IS NULL", (LOST,)
            ).rowcount
    except sqlite3.Error as error:
        # It must not keep a gateway from starting; the audit shows the rows as never ended.
        _LOG.warning("ledger %s: rows of a gateway that is gone could not be closed: %s", file, error)
        return 0


@contextmanager
def _locked(path: Path, *, mine: bool) -> Iterator[bool]:
    if mine:
        yield True
        return
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:  # its gateway has just ended, or another one is at it
        yield False
        return
    try:
        yield _try_lock(descriptor)
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
