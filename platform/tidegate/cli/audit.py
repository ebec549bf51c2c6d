"""`tidegate audit`: the ledgers read, and what they prove."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from tidegate.errors import ConfigError, NoRecordsError
from tidegate.serve.audit import Audit, audit
from tidegate.serve.ledger_reading import read_audited

_AGO = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def since_of(text: str, now_s: float) -> float:
    """A time from `90m` (so long ago) or an ISO date and time, which is local where it names no zone.

    Raises:
        ConfigError: it is neither.
    """
    ago = _AGO.fullmatch(text)
    if ago is not None:
        return now_s - float(ago[1]) * _SECONDS[ago[2]]
    try:
        return datetime.fromisoformat(text).astimezone(UTC).timestamp()
    except ValueError:
        raise ConfigError(f"--since: {text!r} is no time\nhint: `90m`, `2h`, `7d`, or `2026-01-31T12:00`") from None


def read_audit(state_dir: Path, since_s: float, now_s: float, grace_s: float) -> Audit:
    """Audit the requests that were accepted since then.

    Raises:
        NoRecordsError: there are no ledgers.
    """
    folder = state_dir / "ledger"
    if not any(folder.glob("*.sqlite")):
        raise NoRecordsError(str(folder), "no gateway has written a ledger here")
    return audit(read_audited(folder, since_s), now_s, grace_s)


def as_dict(found: Audit) -> dict[str, Any]:
    return {"proven": found.proven, **asdict(found)}


def audit_tables(found: Audit) -> Iterator[Table | Text]:
    lost = f" + lost {found.lost}" if found.lost else ""
    sign = "=" if found.proven else "≠" if found.accepted != _ended(found) else "="
    yield Text(
        f"accepted {found.accepted} {sign} answered {found.answered} + refused {found.refused}"
        f" + cancelled {found.cancelled} + under way {found.under_way}{lost}"
    )
    if found.refused_after_attempts:
        yield Text(f"of the refused, {found.refused_after_attempts} after something was tried")
    yield Text(f"paid to providers: ${found.spent_usd:.4f}; paid for twice: {found.paid_twice}")
    if found.hedged:
        yield Text(f"asked for at two places, as their callers allow: {found.hedged}")
    if found.findings:
        table = Table(title=f"{found.broken} findings", title_justify="left", box=None, pad_edge=False)
        for column in ("request", "gateway", "what"):
            table.add_column(column, overflow="fold")
        for finding in found.findings:
            table.add_row(finding.request, finding.gateway, finding.what)
        yield table
    yield Text("proven" if found.proven else "NOT proven", style="green" if found.proven else "red")


def _ended(found: Audit) -> int:
    return found.answered + found.refused + found.cancelled + found.lost + found.under_way
