"""Jobs on disk: one SQLite file, which the gateways of one machine share. Blocks; not for the event loop.

A running job is held by a gateway under a lease; every change of a held job says whose it must be, so a gateway that
was thought dead can't write over the one that took its job.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from tidegate.serve.jobs import ENDED, Job, JobStatus, startable

_SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    caller TEXT NOT NULL,
    key TEXT,
    key_digest BLOB,
    priority INTEGER NOT NULL,
    body TEXT NOT NULL,
    model TEXT NOT NULL,
    seed INTEGER NOT NULL,
    webhook_url TEXT,
    created_at_s REAL NOT NULL,
    status TEXT NOT NULL,
    run INTEGER NOT NULL DEFAULT 0,
    started_at_s REAL,
    ended_at_s REAL,
    answer TEXT,
    error TEXT,
    backend TEXT,
    computed_s REAL,
    owner TEXT,
    lease_until_s REAL,
    buying INTEGER NOT NULL DEFAULT 0,
    cancel_asked INTEGER NOT NULL DEFAULT 0,
    deliver_at_s REAL,
    deliveries INTEGER NOT NULL DEFAULT 0,
    delivered_at_s REAL,
    UNIQUE (caller, key)
);
CREATE INDEX IF NOT EXISTS by_status ON jobs (status, priority, number);
CREATE INDEX IF NOT EXISTS by_delivery ON jobs (deliver_at_s) WHERE deliver_at_s IS NOT NULL;
"""

_COLUMNS = ", ".join(field.name for field in fields(Job))
_LIGHT = _COLUMNS.replace("answer", "NULL AS answer")


class KeyReusedError(Exception):
    """This caller's Idempotency-Key belongs to a job with another body."""


class JobStore:
    """`owner` is this gateway. All calls must come from one thread."""

    def __init__(self, path: Path, owner: str, lease_s: float) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._owner, self._lease_s = owner, lease_s
        # Autocommit: each change below says by itself where its transaction begins.
        self._db = sqlite3.connect(path, timeout=10.0, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.executescript(_SCHEMA)

    def close(self) -> None:
        self._db.close()

    def submit(self, job: Job, waiting_max: int, key: str | None, digest: bytes) -> Job | None:
        """Store a new job, or find the one that this caller stored under `key`; None where too many wait already.

        Raises:
            KeyReusedError: that one has another body.
        """
        with self._change():
            if key is not None:
                query = "SELECT id, key_digest FROM jobs WHERE caller = ? AND key = ?"
                known = self._db.execute(query, (job.caller, key)).fetchone()
                if known is not None:
                    if known[1] != digest:
                        raise KeyReusedError(key)
                    return self.find(known[0], job.caller)
            query = "SELECT count(*) FROM jobs WHERE caller = ? AND status = 'queued'"
            if self._db.execute(query, (job.caller,)).fetchone()[0] >= waiting_max:
                return None
            self._db.execute(
                "INSERT INTO jobs (id, caller, key, key_digest, priority, body, model, seed, webhook_url, created_at_s,"
                " status) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 'queued')",
                (
                    job.id,
                    job.caller,
                    key,
                    digest,
                    job.priority,
                    job.body,
                    job.model,
                    job.seed,
                    job.webhook_url,
                    job.created_at_s,
                ),
            )
        return job

    def find(self, job: str, caller: str) -> Job | None:
        row = self._db.execute(f"SELECT {_COLUMNS} FROM jobs WHERE id = ? AND caller = ?", (job, caller)).fetchone()
        return None if row is None else _job(row)

    def listed(self, caller: str, *, after: str | None, limit: int, statuses: tuple[str, ...]) -> list[Job] | None:
        """A caller's jobs without their pictures, the newest first, from the one after `after`; None where there is no
        such job (any more)."""
        last = 2**63 - 1
        if after is not None:
            found = self._db.execute("SELECT number FROM jobs WHERE id = ? AND caller = ?", (after, caller)).fetchone()
            if found is None:
                return None
            last = found[0]
        marks = ", ".join("?" for _ in statuses)
        query = (
            f"SELECT {_LIGHT} FROM jobs WHERE caller = ? AND status IN ({marks})"
            " AND number < ? ORDER BY number DESC LIMIT ?"
        )
        rows = self._db.execute(query, (caller, *statuses, last, limit))
        return [_job(row) for row in rows.fetchall()]

    def running(self) -> dict[str, int]:
        """Jobs that run now, by caller, of all gateways."""
        query = "SELECT caller, count(*) FROM jobs WHERE status = 'running' GROUP BY caller"
        return dict(self._db.execute(query).fetchall())

    def start(self, now_s: float, running_max: Mapping[str, int | None], free: int) -> list[Job]:
        """Take up to `free` queued jobs for this gateway."""
        if free <= 0:
            return []
        with self._change():
            # Of one caller no more than could start, however many it has queued.
            query = (
                "SELECT id, caller FROM (SELECT id, caller, priority, number, row_number() OVER"
                " (PARTITION BY caller ORDER BY priority, number) AS turn FROM jobs WHERE status = 'queued')"
                " WHERE turn <= ? ORDER BY priority, number"
            )
            queued = self._db.execute(query, (free,)).fetchall()
            chosen = startable(queued, self.running(), running_max, free)
            for job in chosen:
                self._db.execute(
                    "UPDATE jobs SET status = 'running', run = run + 1, started_at_s = ?, owner = ?, lease_until_s = ?,"
                    " buying = 0 WHERE id = ?",
                    (now_s, self._owner, now_s + self._lease_s, job),
                )
            marks = ", ".join("?" for _ in chosen)
            rows = self._db.execute(
                f"SELECT {_COLUMNS} FROM jobs WHERE id IN ({marks}) ORDER BY priority, number", chosen
            )
            return [_job(row) for row in rows.fetchall()]

    def renew(self, now_s: float) -> set[str]:
        """Go on holding this gateway's jobs; those of them that are to be cancelled."""
        with self._change():
            self._db.execute(
                "UPDATE jobs SET lease_until_s = ? WHERE status = 'running' AND owner = ?",
                (now_s + self._lease_s, self._owner),
            )
            query = "SELECT id FROM jobs WHERE status = 'running' AND owner = ? AND cancel_asked"
            return {row[0] for row in self._db.execute(query, (self._owner,))}

    def recover(self, now_s: float, lost: str, *, mine: bool = False) -> int:
        """Give back what dead gateways held (or, with `mine`, what this one does): to the queue, or to its end with the
        error `lost` where a provider may have been paid. How many."""
        held = "owner = ?" if mine else "lease_until_s < ?"
        by = self._owner if mine else now_s
        with self._change():
            ended = self._db.execute(
                "UPDATE jobs SET status = 'failed', error = ?, ended_at_s = ?,"
                " deliver_at_s = CASE WHEN webhook_url IS NULL THEN NULL ELSE ? END"
                f" WHERE status = 'running' AND buying AND {held}",
                (lost, now_s, now_s, by),
            )
            queued = self._db.execute(
                f"UPDATE jobs SET status = 'queued', owner = NULL WHERE status = 'running' AND {held}", (by,)
            )
            return int(ended.rowcount + queued.rowcount)

    def buying(self, job: str, yes: bool) -> bool:
        """Note that a provider is about to be asked, or has made nothing; whether the job is still this gateway's."""
        return self._mine("buying = ?", (yes,), job)

    def end(self, job: str, now_s: float, status: JobStatus, **values: object) -> bool:
        """End a job of this gateway; whether it still was one. `values` are columns of `Job`."""
        sets = "".join(f"{name} = ?, " for name in values) + (
            "status = ?, ended_at_s = ?, deliver_at_s = CASE WHEN webhook_url IS NULL THEN NULL ELSE ? END"
        )
        return self._mine(sets, (*values.values(), status.value, now_s, now_s), job)

    def cancel(self, job: str, caller: str, now_s: float) -> Job | None:
        """A queued one ends at once; a running one's gateway is told. None where there is none."""
        with self._change():
            self._db.execute(
                "UPDATE jobs SET status = 'cancelled', ended_at_s = ?,"
                " deliver_at_s = CASE WHEN webhook_url IS NULL THEN NULL ELSE ? END"
                " WHERE id = ? AND caller = ? AND status = 'queued'",
                (now_s, now_s, job, caller),
            )
            self._db.execute(
                "UPDATE jobs SET cancel_asked = 1 WHERE id = ? AND caller = ? AND status = 'running'", (job, caller)
            )
            return self.find(job, caller)

    def due_deliveries(self, now_s: float, hold_s: float, most: int) -> list[Job]:
        """Jobs whose webhook is to be sent now. They are held for `hold_s`, so that no other gateway sends it too."""
        with self._change():
            query = f"SELECT {_LIGHT} FROM jobs WHERE deliver_at_s <= ? ORDER BY deliver_at_s LIMIT ?"
            due = [_job(row) for row in self._db.execute(query, (now_s, most)).fetchall()]
            for job in due:
                self._db.execute("UPDATE jobs SET deliver_at_s = ? WHERE id = ?", (now_s + hold_s, job.id))
            return due

    def delivered(self, job: str, *, delivered_at_s: float | None, next_at_s: float | None) -> None:
        """One delivery was tried."""
        with self._change():
            self._db.execute(
                "UPDATE jobs SET deliveries = deliveries + 1, delivered_at_s = ?, deliver_at_s = ? WHERE id = ?",
                (delivered_at_s, next_at_s, job),
            )

    def forget(self, before_s: float) -> None:
        """Jobs that ended before, with their pictures; not while their webhook is still to be delivered."""
        marks = ", ".join(f"'{status}'" for status in sorted(ENDED))
        with self._change():
            self._db.execute(
                f"DELETE FROM jobs WHERE status IN ({marks}) AND ended_at_s < ? AND deliver_at_s IS NULL", (before_s,)
            )

    def _mine(self, sets: str, values: tuple[object, ...], job: str) -> bool:
        with self._change():
            done = self._db.execute(
                f"UPDATE jobs SET {sets} WHERE id = ? AND owner = ? AND status = 'running'",
                (*values, job, self._owner),
            )
            return done.rowcount == 1

    @contextmanager
    def _change(self) -> Iterator[None]:
        """One transaction that is alone from its first statement on."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")


def _job(row: tuple[Any, ...]) -> Job:
    values = dict(zip((field.name for field in fields(Job)), row, strict=True))
    return Job(**{**values, "status": JobStatus(values["status"])})
