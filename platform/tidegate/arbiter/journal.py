"""What was decided and why, one JSON line each, written and synced before anything is done.

A line's `move` is the whole move, so that reading the file again rebuilds the book. A torn last line (a crash while
writing) was never acted on and is dropped, and cut off before the next write.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from pydantic import TypeAdapter

from tidegate.arbiter.book import Book, replay
from tidegate.arbiter.messages import JournalEntry
from tidegate.arbiter.moves import Move, reason, subjects
from tidegate.json_lines import cut_torn_line, read_lines

REPLICA = "replica"
"""Kind of an entry on what a replica serves; its subjects are the application, the replica and its pool."""
JOURNAL = "journal.jsonl"
"""The file's name in the arbiter's state directory."""

_MOVE: TypeAdapter[Move] = TypeAdapter(Move)


class Journal(Protocol):
    def write(self, moves: tuple[Move, ...], why: str, at_s: float) -> None: ...

    def note(self, entry: JournalEntry) -> None: ...

    def book(self) -> Book: ...

    def about(self, subject: str) -> tuple[JournalEntry, ...]: ...


class FileJournal:
    """A journal in one append-only file."""

    def __init__(self, path: Path) -> None:
        self.path = path
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
        self._sync()

    def note(self, entry: JournalEntry) -> None:
        """Write down something seen, which changes no book."""
        line = {"at_s": entry.at_s, "kind": entry.kind, "subjects": entry.subjects, "reason": entry.reason}
        self._file.write(json.dumps({**line, "data": dict(entry.data)}) + "\n")
        self._sync()

    def book(self) -> Book:
        return replay(move for _, move in read_moves(self.path))

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


def read_moves(path: Path) -> Iterator[tuple[float, Move]]:
    """The moves of a journal, each with its time."""
    for line in read_lines(path):
        if "move" in line:
            yield line["at_s"], _MOVE.validate_python(line["move"])
