"""`report.json`: read back from the ledger, the journals and the run's own records."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tidegate.arbiter.journal import JOURNAL
from tidegate.errors import TidegateError
from tidegate.gang.coordinator import JOURNAL as GANG_JOURNAL
from tidegate.json_lines import read_lines
from tidegate.serve.ledger_reading import read_totals
from tidegate.telemetry.goodput import SPANS, fractions, gpu_seconds, read_spans, refine, stalled_s

AVERAGED_STEPS = 20
"""Steps whose mean loss stands for the run's begin and end."""


class IncompleteError(TidegateError):
    """A record that the report needs is not there."""


def build_report(
    state_dir: Path,
    run_dir: Path,
    client_log: Path,
    *,
    asked_beside: int,
    moments: Mapping[str, float],
    judged: Mapping[str, float],
) -> dict[str, Any]:
    """All figures of `report.json`.

    `asked_beside` = requests sent beside the steady client's; `moments` = when the demo did something to the run
    (`rank_killed_at_s`, `began_at_s`, `ended_at_s`); `judged` = digit accuracy before and after.

    Raises:
        IncompleteError: a record is missing.
    """
    journal = list(read_lines(state_dir / JOURNAL))
    gang = list(read_lines(run_dir / GANG_JOURNAL))
    steps = list(read_lines(run_dir / "metrics.jsonl"))
    commits = list(read_lines(run_dir / "checkpoints.jsonl"))
    client = list(read_lines(client_log))
    totals = read_totals(state_dir / "ledger")
    firsts = [line["data"] for line in gang if line["kind"] == "first_step"]
    evicted = _first(gang, "evicted")
    return {
        "requests": {
            "sent": len(client) + asked_beside,
            "answered": int(totals["local"] + totals["spilled"]),
            "failed": sum(1 for row in client if row["problem"] is not None),
            "local": int(totals["local"]),
            "spilled": int(totals["spilled"]),
            "refused": int(totals["refused"]),
            "cancelled": int(totals["cancelled"]),
            "open": int(totals["open"]),
            "p50_s": round(statistics.median(row["took_s"] for row in client), 3),
            "p99_s": round(_quantile([row["took_s"] for row in client], 0.99), 3),
            "spill_cost_usd": round(totals["price_usd"], 2),
        },
        "flip": _flip(journal, firsts),
        "rank_kill": _rank_kill(gang, firsts, moments["rank_killed_at_s"]),
        "hot_gpu": _hot_gpu(gang, firsts, evicted),
        "training": {
            "steps": steps[-1]["step"],
            "world_sizes": _changes(row["world_size"] for row in steps),
            "loss_first": _mean_loss(steps[:AVERAGED_STEPS]),
            "loss_last": _mean_loss(steps[-AVERAGED_STEPS:]),
            "step_p50_s": round(statistics.median(row["step_s"] for row in steps), 4),
            "digit_accuracy_before": judged["before"],
            "digit_accuracy_after": judged["after"],
        },
        "checkpoints": {
            "committed": len(commits),
            "stall_p50_s": round(statistics.median(row["stall_s"] for row in commits), 4),
            "stall_max_s": round(max(row["stall_s"] for row in commits), 4),
        },
        "goodput": _goodput(state_dir, totals["compute_s"], commits, moments),
    }


def _flip(journal: list[dict[str, Any]], firsts: list[dict[str, Any]]) -> dict[str, float]:
    filed = _first(journal, "file")["at_s"]
    entered = {line["move"]["to"]: line["at_s"] for line in journal if line["kind"] == "advance"}
    closed = [line["at_s"] for line in journal if line["kind"] == "route" and line["move"]["spillway"] == "closed"]
    home = next((at_s for at_s in closed if at_s > entered["returning"]), None)
    if home is None:
        raise IncompleteError("the journal does not say that the spillway closed after training")
    return {
        "claim_to_granted_s": round(entered["granted"] - filed, 3),
        "claim_to_first_step_s": round(firsts[0]["step_at_s"] - filed, 3),
        "return_s": round(home - entered["returning"], 3),
    }


def _rank_kill(gang: list[dict[str, Any]], firsts: list[dict[str, Any]], killed_at_s: float) -> dict[str, float]:
    # Whatever was heard of first: the rank's death, or a peer that has lost its connection to it.
    planned = _first((line for line in gang if line["at_s"] >= killed_at_s), "planned")
    after = _after(firsts, planned)
    return {"to_next_step_s": round(after["step_at_s"] - killed_at_s, 3), "steps_lost": after["steps_lost"]}


def _hot_gpu(gang: list[dict[str, Any]], firsts: list[dict[str, Any]], evicted: dict[str, Any]) -> dict[str, float]:
    reading_at_s = _first(gang, "verdict")["data"]["reading_at_s"]
    after = _after(firsts, evicted)
    gone_at_s = next(
        line["data"]["gone_at_s"]
        for line in gang
        if line["kind"] == "cleared"
        and line["data"]["node"] == evicted["data"]["node"]
        and line["data"]["generation"] == after["generation"]
    )
    return {
        "reading_to_rank_gone_s": round(gone_at_s - reading_at_s, 3),
        "to_next_step_s": round(after["step_at_s"] - reading_at_s, 3),
        "steps_lost": after["steps_lost"],
    }


def _goodput(
    state_dir: Path, serving_s: float, commits: list[dict[str, Any]], moments: Mapping[str, float]
) -> dict[str, float]:
    total = gpu_seconds(read_spans(state_dir / SPANS), moments["began_at_s"], moments["ended_at_s"])
    return {owner: round(share, 5) for owner, share in fractions(refine(total, serving_s, stalled_s(commits))).items()}


def _first(lines: Iterable[dict[str, Any]], kind: str) -> dict[str, Any]:
    found = next((line for line in lines if line["kind"] == kind), None)
    if found is None:
        raise IncompleteError(f"no record of kind {kind!r}")
    return found


def _after(firsts: list[dict[str, Any]], fault: dict[str, Any]) -> dict[str, Any]:
    """The first step of the first generation that made one after `fault`."""
    found = next((first for first in firsts if first["step_at_s"] > fault["at_s"]), None)
    if found is None:
        raise IncompleteError(f"no step after the {fault['kind']} of {fault['at_s']:.0f}")
    return found


def _mean_loss(steps: list[dict[str, Any]]) -> float:
    """Of the steps that were not skipped (a skipped one has no loss)."""
    return round(statistics.fmean(row["loss"] for row in steps if row["loss"] is not None), 4)


def _changes(values: Iterable[int]) -> list[int]:
    changed: list[int] = []
    for value in values:
        if not changed or changed[-1] != value:
            changed.append(value)
    return changed


def _quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def write_report(report: Mapping[str, Any], path: Path) -> None:
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
