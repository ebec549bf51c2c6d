"""What became of every request: SQLite files of each gateway, one row a request, one row an attempt.

Every request id ends exactly once. Writes are kept in memory and flushed by a thread of their own, so the event loop
never waits for a disk; a gateway that is killed loses at most the last `FLUSH_S` seconds of rows, and what it left open
is closed by the next one that starts (`ledger_lost.py`).

A file that has grown to `ROTATE_BYTES` is followed by the next, `GATEWAY.0001.sqlite`. All rows of one request stay in
the file in which it was accepted, so old files can be moved away whole.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from contextlib import ExitStack, closing
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tidegate.ids import GatewayId, RequestId
from tidegate.serve.ledger_lost import Life, close_lost

FLUSH_S = 0.5

ROTATE_BYTES = 256 * 2**20
"""About a million requests."""

CANARY = "canary-"
"""How the request ids of canaries begin."""

_LOG = logging.getLogger(__name__)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS requests (
    request_id TEXT PRIMARY KEY,
    accepted_at_s REAL NOT NULL,
    ended_at_s REAL,
    outcome TEXT,
    backend TEXT,
    reason TEXT,
    images INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS attempts (
    request_id TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    backend TEXT NOT NULL,
    started_at_s REAL NOT NULL,
    ended_at_s REAL NOT NULL,
    outcome TEXT NOT NULL,
    reason TEXT,
    price_usd REAL NOT NULL,
    compute_s REAL NOT NULL,
    hedge INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (request_id, attempt)
);
"""


class Outcome(StrEnum):
    """How a request ended."""

    ANSWERED = "answered"
    REFUSED = "refused"
    """With a reason, before any work."""
    CANCELLED = "cancelled"
    """The client left."""
    FAILED = "failed"
    """Something was tried and nothing answered in time."""
    LOST = "lost"
    """Its gateway was killed."""


class AttemptOutcome(StrEnum):
    ANSWERED = "answered"
    BUSY = "busy"
    """No slot after all; nothing was done."""
    LOST = "lost"
    """The replica went away, or a provider's answer did."""
    REFUSED = "refused"
    ERROR = "error"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    request: RequestId
    attempt: int
    """From 1."""
    backend: str
    """`local/<pool>` or `provider/<name>`."""
    started_at_s: float
    ended_at_s: float
    outcome: AttemptOutcome
    reason: str | None = None
    price_usd: float = 0.0
    """What it cost, or may have cost where the answer was lost."""
    compute_s: float = 0.0
    """GPU-seconds here."""
    hedge: bool = False
    """A second place was asked, with the caller's leave, while the first was at it."""


class EndedTwiceError(RuntimeError):
    """A request was ended that isn't open: a bug in the gateway."""


class Ledger:
    """One gateway's files. Calls come from one thread and return at once.

    `lock_timeout_s`: how long one write waits for a reader that locks the file; it is then tried again later.
    """

    def __init__(
        self, folder: Path, gateway: GatewayId, lock_timeout_s: float = 5.0, rotate_bytes: int = ROTATE_BYTES
    ) -> None:
        self._folder, self._gateway = folder, gateway
        self._lock_timeout_s, self._rotate_bytes = lock_timeout_s, rotate_bytes
        self.write_failures = 0
        """Flushes that failed; their rows were kept."""
        self._spent_usd: dict[str, float] = {}
        folder.mkdir(parents=True, exist_ok=True)
        self._life = Life.begin(folder, gateway)
        self.lost = close_lost(folder, self._life)
        """Requests that gateways which are gone had left open."""
        self._number = 0
        while self._path(self._number + 1).exists():
            self._number += 1
        for number in range(self._number + 1):
            with closing(self._connect(number)) as db:
                for backend, usd in db.execute("SELECT backend, sum(price_usd) FROM attempts GROUP BY backend"):
                    self._spent_usd[backend] = self._spent_usd.get(backend, 0.0) + usd
        self._open: dict[RequestId, int] = {}
        """The number of the file in which each open request was accepted."""
        self._rows: list[_Row] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._flush_until_closed, name="ledger", daemon=True)
        self._thread.start()

    @property
    def files(self) -> int:
        """How many it has; new requests go to the last one."""
        return self._number + 1

    def accept(self, request: RequestId, at_s: float) -> None:
        self._open[request] = self._number
        self._write(request, "INSERT INTO requests (request_id, accepted_at_s) VALUES (?, ?)", (request, at_s))

    def attempt(self, attempt: Attempt) -> None:
        self._spent_usd[attempt.backend] = self._spent_usd.get(attempt.backend, 0.0) + attempt.price_usd
        self._write(
            attempt.request,
            "INSERT INTO attempts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                attempt.request,
                attempt.attempt,
                attempt.backend,
                attempt.started_at_s,
                attempt.ended_at_s,
                attempt.outcome,
                attempt.reason,
                attempt.price_usd,
                attempt.compute_s,
                attempt.hedge,
            ),
        )

    def end(
        self,
        request: RequestId,
        at_s: float,
        outcome: Outcome,
        *,
        backend: str | None = None,
        reason: str | None = None,
        images: int = 0,
    ) -> None:
        """End an open request.

        Raises:
            EndedTwiceError: it isn't open.
        """
        if request not in self._open:
            raise EndedTwiceError(f"request {request} is not open; outcome {outcome} would end it twice")
        self._write(
            request,
            "UPDATE requests SET ended_at_s = ?, outcome = ?, backend = ?, reason = ?, images = ? WHERE request_id = ?",
            (at_s, outcome, backend, reason, images, request),
        )
        del self._open[request]

    def spent_usd(self, backend: str | None = None) -> float:
        """Paid to one backend, or to all, since its first file exists; with what is not flushed yet."""
        return sum(self._spent_usd.values()) if backend is None else self._spent_usd.get(backend, 0.0)

    def close(self) -> None:
        """Flush and stop. Idempotent."""
        if not self._stop.is_set():
            self._stop.set()
            self._thread.join()
            self._life.end()

    def _write(self, request: RequestId, statement: str, values: tuple[object, ...]) -> None:
        with self._lock:
            self._rows.append(_Row(self._open.get(request, self._number), statement, values))

    def _path(self, number: int) -> Path:
        return self._folder / (f"{self._gateway}.{number:04}.sqlite" if number else f"{self._gateway}.sqlite")

    def _connect(self, number: int) -> sqlite3.Connection:
        db = sqlite3.connect(self._path(number), timeout=self._lock_timeout_s)
        db.execute("PRAGMA journal_mode=WAL")
        db.executescript(_SCHEMA)
        if not has_hedge(db):  # written by an older version
            db.execute("ALTER TABLE attempts ADD COLUMN hedge INTEGER NOT NULL DEFAULT 0")
        return db

    def _flush_until_closed(self) -> None:
        with ExitStack() as closes:
            files: dict[int, sqlite3.Connection] = {}
            done = False
            while not done:
                done = self._stop.wait(FLUSH_S)
                for number, rows in self._taken():
                    if number not in files:
                        files[number] = closes.enter_context(closing(self._connect(number)))
                    self._flush(files[number], number, rows)
                if self._path(self._number).stat().st_size >= self._rotate_bytes:
                    files[self._number + 1] = closes.enter_context(closing(self._connect(self._number + 1)))
                    self._number += 1
                for number in [number for number in files if number < self._number]:
                    if number not in self._open.copy().values():
                        files.pop(number).close()

    def _taken(self) -> list[tuple[int, list[_Row]]]:
        """What is to be written, by file, each in the order of the calls."""
        with self._lock:
            rows, self._rows = self._rows, []
        by_file: dict[int, list[_Row]] = {}
        for row in rows:
            by_file.setdefault(row.number, []).append(row)
        return sorted(by_file.items())

    def _flush(self, db: sqlite3.Connection, number: int, rows: list[_Row]) -> None:
        try:
            with db:
                for row in rows:
                    db.execute(row.statement, row.values)
        except sqlite3.OperationalError as error:
            # A full or locked disk must not stop serving; the rows are kept and tried again in FLUSH_S.
            _LOG.warning("ledger %s: %d rows not written yet: %s", self._path(number), len(rows), error)
            self.write_failures += 1
            with self._lock:
                self._rows = rows + self._rows


def has_hedge(db: sqlite3.Connection) -> bool:
    return "hedge" in [column[1] for column in db.execute("PRAGMA table_info(attempts)")]


@dataclass(frozen=True, slots=True)
class _Row:
    number: int
    """Of the file that it goes to."""
    statement: str
    values: tuple[object, ...]
