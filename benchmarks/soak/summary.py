"""A soak's summary: one JSON file for machines, one page of Markdown for people."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.contract import Machine
from benchmarks.soak.verdict import Check


@dataclass(frozen=True, slots=True, kw_only=True)
class Happened:
    """One fault as it went."""

    number: int
    kind: str
    what: str
    at_s: float
    """Since the client's first request."""
    step: int
    """The gang's, just before."""
    healed_after_s: float
    """From the fault to the gang at work again (or to the killed part's answer), as often as it was looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    minutes: float
    seed: int
    faults: Sequence[Happened]
    requests: Mapping[str, float]
    training: Mapping[str, float]
    goodput: Mapping[str, float]
    checks: Sequence[Check]
    versions: Mapping[str, str]
    machine: Machine
    at: str

    @property
    def holds(self) -> bool:
        return all(check.holds for check in self.checks)


def write(summary: Summary, folder: Path) -> None:
    """`soak.json` and `soak.md`."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {**asdict(summary), "machine": summary.machine.model_dump(), "holds": summary.holds}
    (folder / "soak.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    (folder / "soak.md").write_text(page(summary), encoding="utf-8")


def page(summary: Summary) -> str:
    verdict = "everything held" if summary.holds else "NOT everything held"
    lines = [
        f"# Soak of {summary.minutes:.0f} minutes with {len(summary.faults)} faults: {verdict}",
        "",
        f"Seed {summary.seed}, {summary.at}, {summary.machine.cores} cores of {summary.machine.cpu}.",
        "",
        "| check | holds | seen |",
        "|---|---|---|",
        *(f"| {check.name} | {'yes' if check.holds else 'no'} | {check.detail} |" for check in summary.checks),
        "",
        "| fault | times | healed after, median | longest |",
        "|---|---|---|---|",
        *_kinds(summary.faults),
        "",
        "| | |",
        "|---|---|",
        *(f"| requests: {name} | {value:g} |" for name, value in summary.requests.items()),
        *(f"| training: {name} | {value:g} |" for name, value in summary.training.items()),
        *(f"| GPU time: {name} | {value:.1%} |" for name, value in summary.goodput.items() if value),
    ]
    return "\n".join(lines) + "\n"


def _kinds(faults: Sequence[Happened]) -> list[str]:
    rows = []
    for kind in sorted({fault.kind for fault in faults}):
        took = [fault.healed_after_s for fault in faults if fault.kind == kind]
        rows.append(f"| {kind} | {len(took)} | {statistics.median(took):.1f} s | {max(took):.1f} s |")
    return rows
