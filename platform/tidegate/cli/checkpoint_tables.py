"""Checkpoints as tables, lines and JSON rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from tidegate.checkpoint.scrub import Look, State

if TYPE_CHECKING:
    from tidegate.checkpoint.difference import Difference  # brings torch with it, which only `diff` needs

_STYLE = {State.GOOD: "green", State.UNFINISHED: "yellow", State.BAD: "bold red"}


def look_table(looks: Sequence[Look], now_s: float) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("tier", "step", "generation", "size", "age", "state", "marks", "why"):
        table.add_column(column, overflow="fold", justify="right" if column in ("step", "size", "age") else "left")
    for found in looks:
        table.add_row(
            found.tier.label,
            str(found.candidate.step),
            str(found.candidate.generation),
            _size(found),
            shown_age(found.age_s(now_s)),
            Text(found.state, style=_STYLE[found.state]),
            "; ".join(f"{mark}: {why}" if why else mark for mark, why in found.marks.items()),
            found.why,
        )
    return table


def look_rows(looks: Sequence[Look], now_s: float) -> list[dict[str, Any]]:
    return [
        {
            "tier": found.tier.label,
            "name": found.candidate.name,
            "step": found.candidate.step,
            "generation": found.candidate.generation,
            "bytes": None if found.manifest is None else found.manifest.total_bytes,
            "age_s": found.age_s(now_s),
            "state": found.state,
            "why": found.why,
            "marks": {str(mark): why for mark, why in found.marks.items()},
        }
        for found in looks
    ]


def look_line(found: Look) -> str:
    return f"{found.tier.label}: {found.candidate.name}: {found.state}, {found.why or _size(found)}"


def difference_table(found: Sequence[Difference]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("tensor", overflow="fold")
    table.add_column("max abs difference", justify="right")
    table.add_column("why", overflow="fold")
    for row in found:
        table.add_row(row.tensor, "-" if row.max_abs is None else f"{row.max_abs:.6g}", row.why)
    return table


def difference_rows(found: Sequence[Difference]) -> list[dict[str, Any]]:
    """JSON knows no NaN and no infinity: they are text."""
    return [
        {
            "tensor": row.tensor,
            "max_abs": row.max_abs if row.max_abs is None or math.isfinite(row.max_abs) else str(row.max_abs),
            "why": row.why,
        }
        for row in found
    ]


def shown_age(age_s: float | None) -> str:
    """`-`: never committed, or its manifest can't be read."""
    if age_s is None:
        return "-"
    text = next(
        (
            f"{abs(age_s) / unit:.1f} {name}"
            for unit, name in ((86400, "d"), (3600, "h"), (60, "min"))
            if abs(age_s) >= unit
        ),
        f"{abs(age_s):.0f} s",
    )
    # A second or two is what clocks of two machines differ by at any time.
    return text if age_s > -2 else f"{text} ahead of this clock"


def _size(found: Look) -> str:
    return "-" if found.manifest is None else decimal(found.manifest.total_bytes)
