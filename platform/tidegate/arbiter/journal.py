"""What was decided and why, one JSON line each, written and synced before anything is done.

A line's `move` is the whole move, so that reading the file again rebuilds the book. A torn last line (a crash while
writing) was never acted on and is dropped, and cut off before the next write.

Beside the journal lies the book as it stood at one of its lines: a restart reads that and only the lines behind it. The
journal is what counts: a book that does not belong to it, or is unreadable, is passed over and everything is replayed.
"""

from __future__ import annotations

import json
import logging
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from pydantic import TypeAdapter

from tidegate.arbiter.book import Book, replay
from tidegate.arbiter.messages import JournalEntry
from tidegate.arbiter.moves import Move, reason, subjects
from tidegate.arbiter.snapshot import book_from_json, book_to_json
from tidegate.json_lines import cut_torn_line, read_lines

log = logging.getLogger(__name__)

REPLICA = "replica"
"""Kind of an entry on what a replica serves; its subjects are the application, the replica and its pool."""
JOURNAL = "journal.jsonl"
"""The file's name in the arbiter's state directory."""
KEEP_EVERY_LINES = 2000
"""A restart has at most about so many to replay, in a fraction of a second."""
_SEAL_BYTES = 4096
"""So much of the journal before a kept book's place must be what it was."""

_MOVE: TypeAdapter[Move] = TypeAdapter(Move)


class Journal(Protocol):
    def write(self, moves: tuple[Move, ...], why: str, at_s: float) -> None: ...

    def note(self, entry: JournalEntry) -> None: ...

    def keep(self, book: Book) -> None: ...

    def book(self) -> Book: ...

    def about(self, subject: str) -> tuple[JournalEntry, ...]: ...


class FileJournal:
    """A journal in one append-only file, with a kept book beside it."""

    def __init__(self, path: Path, keep_every_lines: int = KEEP_EVERY_LINES) -> None:
        self.path = path
        self._keep_every_lines = keep_every_lines
        self.kept_path = path.with_name("book.json")
        self._lines = 0
        """Written, or replayed, since the book was kept last."""
        path.parent.mkdir(parents=True, exist_ok=True)
        cut_torn_line(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, moves: tuple[Move, ...], why: str, at_s: float) -> None:
        """Write moves; they are on the disk when this returns.

        Raises:
            OSError: nothing may be done that could not be written down.
        """
        for move in moves:
            line = {
                "at_s": at_s,
                "kind": move.kind,
                "subjects": subjects(move),
                "reason": reason(move) or why,
                "move": _MOVE.dump_python(move, mode="json"),
            }
            self._file.write(json.dumps(line) + "\n")
        self._lines += len(moves)
        self._sync()

    def note(self, entry: JournalEntry) -> None:
        """Write down something seen, which changes no book."""
        line = {"at_s": entry.at_s, "kind": entry.kind, "subjects": entry.subjects, "reason": entry.reason}
        self._file.write(json.dumps({**line, "data": dict(entry.data)}) + "\n")
        self._lines += 1
        self._sync()

    def keep(self, book: Book) -> None:
        """Told the book after each write: keeps it if many lines were written since it was kept last."""
        if self._lines < self._keep_every_lines:
            return
        self._lines = 0
        end_bytes = os.fstat(self._file.fileno()).st_size
        kept = {"journal_bytes": end_bytes, "seal": self._seal(end_bytes), "book": book_to_json(book)}
        half = self.kept_path.with_suffix(".half")
        try:
            with half.open("w", encoding="utf-8") as file:
                json.dump(kept, file)
                file.flush()
                os.fsync(file.fileno())
            half.replace(self.kept_path)
        except OSError as error:  # nothing is lost: the journal has it all
            log.warning("the book cannot be kept: %s", error)

    def book(self) -> Book:
        begin_bytes, book = self._kept()
        self._lines = 0

        def moves() -> Iterator[Move]:
            for _, move in read_moves(self.path, begin_bytes):
                self._lines += 1
                yield move

        return replay(moves(), book)

    def _kept(self) -> tuple[int, Book]:
        """The kept book and where in the journal it stood; an empty one at its begin where none fits."""
        try:
            kept = json.loads(self.kept_path.read_text(encoding="utf-8"))
            if kept["seal"] == self._seal(kept["journal_bytes"]):
                return kept["journal_bytes"], book_from_json(kept["book"])
            log.warning("%s is of another journal; all of %s is replayed", self.kept_path, self.path)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("%s is no use, all of %s is replayed: %s", self.kept_path, self.path, error)
        return 0, Book()

    def _seal(self, end_bytes: int) -> int | None:
        """Of the journal's bytes just before; None where it has fewer."""
        begin_bytes = max(0, end_bytes - _SEAL_BYTES)
        with self.path.open("rb") as file:
            file.seek(begin_bytes)
            found = file.read(end_bytes - begin_bytes)
        return zlib.crc32(found) if len(found) == end_bytes - begin_bytes else None

    def about(self, subject: str) -> tuple[JournalEntry, ...]:
        """Entries that speak of `subject`: a claim, node, GPU, pool, replica, rule, or the beginning of its id."""
        return _about(lambda: map(_entry, read_lines(self.path)), subject)

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())


class MemoryJournal:
    """A journal for tests and dry runs."""

    def __init__(self) -> None:
        self.moves: list[Move] = []
        self.entries: list[JournalEntry] = []

    def write(self, moves: tuple[Move, ...], why: str, at_s: float) -> None:
        for move in moves:
            self.moves.append(move)
            self.entries.append(
                JournalEntry(at_s=at_s, kind=move.kind, subjects=subjects(move), reason=reason(move) or why)
            )

    def note(self, entry: JournalEntry) -> None:
        self.entries.append(entry)

    def keep(self, book: Book) -> None:
        """Nothing: its moves are in memory already."""

    def book(self) -> Book:
        return replay(self.moves)

    def about(self, subject: str) -> tuple[JournalEntry, ...]:
        return _about(lambda: self.entries, subject)


def _entry(line: dict[str, Any]) -> JournalEntry:
    return JournalEntry(
        at_s=line["at_s"],
        kind=line["kind"],
        subjects=tuple(line["subjects"]),
        reason=line["reason"],
        data=line.get("move") or line.get("data") or {},
    )


def _about(read: Callable[[], Iterable[JournalEntry]], subject: str) -> tuple[JournalEntry, ...]:
    """What speaks of `subject`. A replica comes and goes by its pool's targets: of those too, if it is one."""
    pools = {
        entry.subjects[-1]
        for entry in read()
        if entry.kind == REPLICA and len(entry.subjects) > 2 and is_about(entry.subjects[1], subject)
    }

    def speaks(entry: JournalEntry) -> bool:
        if any(is_about(name, subject) for name in entry.subjects):
            return True
        return entry.kind != REPLICA and not pools.isdisjoint(entry.subjects)

    return tuple(entry for entry in read() if speaks(entry))


def is_about(name: str, subject: str) -> bool:
    """Whether `subject`, as a person types it, means `name`: the whole of it, or the first six characters or more.

    A pool is found under its node's id too.
    """
    if name == subject:
        return True
    if len(subject) < 6:
        return False
    pool = name.removeprefix("pool-")
    return name.startswith(subject) or (pool != name and (pool.startswith(subject) or subject.startswith(pool)))


def read_moves(path: Path, begin_bytes: int = 0) -> Iterator[tuple[float, Move]]:
    """The moves of a journal from a line's first byte on, each with its time."""
    for line in read_lines(path, begin_bytes):
        if "move" in line:
            yield line["at_s"], _MOVE.validate_python(line["move"])
