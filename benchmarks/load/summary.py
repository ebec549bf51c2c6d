"""A load test's summary: one JSON file for machines, one page of Markdown for people."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.contract import Machine
from benchmarks.load.asks import Kind
from benchmarks.load.story import Phase
from benchmarks.soak.verdict import Check


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSeen:
    """What the clients saw of one phase, by the time at which they asked."""

    name: str
    lasted_s: float
    replicas: int
    """Running when it ended."""
    asks: int
    local: int
    spilled: int
    p50_s: float | None
    """Of sound requests that were answered; None = there were none."""
    p99_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    minutes: float
    rate_per_s: float
    """As it was sent."""
    seed: int
    haproxy: bool
    asks: Mapping[str, int]
    """By kind."""
    phases: Sequence[PhaseSeen]
    audit: Mapping[str, Any]
    provider: Mapping[str, int]
    checks: Sequence[Check]
    versions: Mapping[str, str]
    machine: Machine
    at: str

    @property
    def holds(self) -> bool:
        return all(check.holds for check in self.checks)


def seen(phases: Sequence[Phase], heard: Sequence[Mapping[str, Any]]) -> tuple[PhaseSeen, ...]:
    return tuple(_seen(phase, heard) for phase in phases)


def _seen(phase: Phase, heard: Sequence[Mapping[str, Any]]) -> PhaseSeen:
    mine = [row for row in heard if phase.began_at_s <= row["sent_at_s"] < phase.ended_at_s]
    places = Counter(row["backend"].partition("/")[0] for row in mine)
    took_s = sorted(row["took_s"] for row in mine if row["kind"] == Kind.SOUND and row["status"] == 200)
    percentiles = statistics.quantiles(took_s, n=100, method="inclusive") if len(took_s) > 1 else None
    return PhaseSeen(
        name=phase.name,
        lasted_s=round(phase.ended_at_s - phase.began_at_s, 1),
        replicas=phase.replicas,
        asks=len(mine),
        local=places["local"],
        spilled=places["provider"],
        p50_s=None if percentiles is None else round(percentiles[49], 4),
        p99_s=None if percentiles is None else round(percentiles[98], 4),
    )


def kinds(heard: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    counted = Counter(row["kind"] for row in heard)
    return {str(kind): counted[kind] for kind in Kind}


def write(summary: Summary, folder: Path) -> None:
    """`load.json` and `load.md`."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {**asdict(summary), "machine": summary.machine.model_dump(), "holds": summary.holds}
    (folder / "load.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    (folder / "load.md").write_text(page(summary), encoding="utf-8")


def page(summary: Summary) -> str:
    verdict = "everything held" if summary.holds else "NOT everything held"
    asked = ", ".join(f"{count} {kind}" for kind, count in summary.asks.items())
    ingress = "Serve's HAProxy" if summary.haproxy else "Serve's Python proxy"
    lines = [
        f"# Load of {summary.rate_per_s:.1f} requests/s for {summary.minutes:.1f} minutes: {verdict}",
        "",
        f"Seed {summary.seed}, {summary.at}, {summary.machine.cores} cores of {summary.machine.cpu}.",
        f"Ingress: {ingress}. Asks: {asked}.",
        "",
        "| check | holds | seen |",
        "|---|---|---|",
        *(f"| {check.name} | {'yes' if check.holds else 'no'} | {check.detail} |" for check in summary.checks),
        "",
        "| phase | lasted | replicas at its end | asks | answered here | spilled | p50 | p99 |",
        "|---|---|---|---|---|---|---|---|",
        *(_row(phase) for phase in summary.phases),
    ]
    return "\n".join(lines) + "\n"


def _row(phase: PhaseSeen) -> str:
    cells = (
        phase.name,
        f"{phase.lasted_s:g} s",
        str(phase.replicas),
        str(phase.asks),
        str(phase.local),
        str(phase.spilled),
        *("" if took_s is None else f"{1000 * took_s:.0f} ms" for took_s in (phase.p50_s, phase.p99_s)),
    )
    return f"| {' | '.join(cells)} |"
