"""`tidegate why`: the journal's lines on one thing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.table import Table

from tidegate.arbiter.messages import JournalEntry


def journal_rows(entries: Sequence[JournalEntry]) -> list[dict[str, Any]]:
    return [
        {
            "at_s": entry.at_s,
            "kind": entry.kind,
            "subjects": list(entry.subjects),
            "reason": entry.reason,
            "data": dict(entry.data),
        }
        for entry in entries
    ]


def show_journal(subject: str, entries: Sequence[JournalEntry], console: Console) -> None:
    if not entries:
        console.print(f"the journal does not speak of {subject}", highlight=False)
        console.print("hint: `tidegate status` lists claims, nodes and GPUs", highlight=False)
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("at")
    table.add_column("what")
    table.add_column("why", overflow="fold")
    for entry in entries:
        what = entry.kind
        if entry.kind == "advance":
            what = f"-> {entry.data.get('to')}"
        if entry.kind == "set_target":
            what = f"{entry.data.get('pool')} = {entry.data.get('replicas')}"
        at = datetime.fromtimestamp(entry.at_s).astimezone().strftime("%H:%M:%S.%f")[:-4]
        table.add_row(at, what, entry.reason)
    console.print(table)
    for entry in entries:
        stacks = entry.data.get("stacks")
        if isinstance(stacks, Mapping):
            for whose, text in stacks.items():
                console.print(f"\n{whose} stood here:\n{text}", highlight=False, markup=False, soft_wrap=True)
