"""What the ledgers' files say, of every gateway that ever wrote one: rows, sums, and what an audit needs."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tidegate.serve.ledger import CANARY, has_hedge


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRow:
    gateway: str
    request_id: str
    accepted_at_s: float
    ended_at_s: float | None
    """None = still open, or its gateway was killed."""
    outcome: str | None
    backend: str | None
    reason: str | None
    images: int
    attempts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Audited:
    """A request with what its attempts add up to."""

    gateway: str
    request_id: str
    accepted_at_s: float | None
    """None = it has attempts, but was never accepted."""
    outcome: str | None
    reason: str | None
    images: int
    attempts: int
    answered_attempts: int
    paid_attempts: int
    """At providers, and not refused: made, or perhaps made."""
    paid_to: str
    price_usd: float
    hedges: int = 0
    """Attempts beside the first one that its caller has allowed."""


def read_rows(folder: Path) -> Iterator[RequestRow]:
    """Every request of every gateway's file in `folder`, file by file, by time of acceptance."""
    for path in sorted(folder.glob("*.sqlite")):
        with _reading(path) as db:
            query = (
                "SELECT request_id, accepted_at_s, ended_at_s, outcome, backend, reason, images,"
                " (SELECT count(*) FROM attempts a WHERE a.request_id = r.request_id)"
                " FROM requests r ORDER BY accepted_at_s, request_id"
            )
            for row in db.execute(query):
                yield RequestRow(
                    gateway=_gateway_of(path),
                    request_id=row[0],
                    accepted_at_s=row[1],
                    ended_at_s=row[2],
                    outcome=row[3],
                    backend=row[4],
                    reason=row[5],
                    images=row[6],
                    attempts=row[7],
                )


def read_totals(folder: Path, since_s: float = 0.0, until_s: float = 1e12) -> dict[str, float]:
    """Sums over all gateways' files in `folder`, of requests accepted (and attempts started) between two times.

    `sent` = `local` + `spilled` + `refused` + `cancelled` + `failed` + `lost` + `open`; besides
    `images`, `attempts` (`canaries` are among them: no client's request, but paid for), `price_usd` and `compute_s`.
    """
    names = ("sent", "local", "spilled", "refused", "cancelled", "failed", "lost", "open", "images")
    query = (
        "SELECT count(*),"
        " coalesce(sum(outcome = 'answered' AND backend LIKE 'local/%'), 0),"
        " coalesce(sum(outcome = 'answered' AND backend LIKE 'provider/%'), 0),"
        " coalesce(sum(outcome = 'refused'), 0), coalesce(sum(outcome = 'cancelled'), 0),"
        " coalesce(sum(outcome = 'failed'), 0), coalesce(sum(outcome = 'lost'), 0),"
        " coalesce(sum(outcome IS NULL), 0), coalesce(sum(images), 0)"
        " FROM requests WHERE accepted_at_s >= ? AND accepted_at_s < ?"
    )
    cost_names = ("attempts", "canaries", "price_usd", "compute_s")
    costs = (
        f"SELECT count(*), coalesce(sum(request_id LIKE '{CANARY}%'), 0),"
        " coalesce(sum(price_usd), 0.0), coalesce(sum(compute_s), 0.0)"
        " FROM attempts WHERE started_at_s >= ? AND started_at_s < ?"
    )
    between = (since_s, until_s)
    totals: dict[str, float] = dict.fromkeys(names + cost_names, 0)
    for path in sorted(folder.glob("*.sqlite")):
        with _reading(path) as db:
            sums = (*db.execute(query, between).fetchone(), *db.execute(costs, between).fetchone())
        for name, value in zip(names + cost_names, sums, strict=True):
            totals[name] += value
    return totals


_AUDIT = f"""
WITH sums AS (
    SELECT request_id, count(*) AS attempts, min(started_at_s) AS began_s, sum(price_usd) AS price_usd,
        sum(outcome = 'answered') AS answered,
        sum(backend LIKE 'provider/%' AND outcome NOT IN ('refused', 'busy')) AS paid,
        sum({{hedge}} AND outcome != 'refused') AS hedges,
        group_concat(
            CASE WHEN backend LIKE 'provider/%' AND outcome NOT IN ('refused', 'busy') THEN backend END
        ) AS paid_to
    FROM attempts WHERE request_id NOT LIKE '{CANARY}%' GROUP BY request_id
)
SELECT request_id, accepted_at_s, outcome, reason, images, coalesce(attempts, 0), coalesce(answered, 0),
    coalesce(paid, 0), coalesce(paid_to, ''), coalesce(price_usd, 0.0), coalesce(hedges, 0)
FROM requests LEFT JOIN sums USING (request_id) WHERE accepted_at_s >= :since_s
UNION ALL
SELECT request_id, NULL, NULL, NULL, 0, attempts, answered, paid, coalesce(paid_to, ''), price_usd, hedges
FROM sums WHERE began_s >= :since_s AND request_id NOT IN (SELECT request_id FROM requests)
"""


def read_audited(folder: Path, since_s: float = 0.0) -> Iterator[Audited]:
    """Every request of every file in `folder` that was accepted since then, and attempts without one. Canaries are no
    client's requests."""
    for path in sorted(folder.glob("*.sqlite")):
        with _reading(path) as db:
            query = _AUDIT.format(hedge="hedge" if has_hedge(db) else "0")
            for row in db.execute(query, {"since_s": since_s}):
                yield Audited(
                    gateway=_gateway_of(path),
                    request_id=row[0],
                    accepted_at_s=row[1],
                    outcome=row[2],
                    reason=row[3],
                    images=row[4],
                    attempts=row[5],
                    answered_attempts=row[6],
                    paid_attempts=row[7],
                    paid_to=row[8],
                    price_usd=row[9],
                    hedges=row[10],
                )


def _gateway_of(path: Path) -> str:
    return path.name.partition(".")[0]


@contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=5.0)) as db:
        yield db
