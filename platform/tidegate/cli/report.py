"""`tidegate report`: the arbiter's files, read and summed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from tidegate.arbiter.holdings import Holding, holdings
from tidegate.arbiter.journal import JOURNAL, read_moves
from tidegate.errors import NoRecordsError, UnknownSubjectError
from tidegate.json_lines import read_lines
from tidegate.serve.ledger_reading import read_totals
from tidegate.telemetry.goodput import SPANS, Span, looked_until_s, read_spans, stalled_s
from tidegate.telemetry.report import (
    Times,
    account,
    busy_times,
    cluster_seconds,
    run_seconds,
    save_interval,
    window,
)


def read_report(
    state_dir: Path, run: str | None, *, run_dir: Path | None = None, last_s: float | None = None
) -> dict[str, Any]:
    """The whole cluster's account with a line for each run, or one run's.

    Raises:
        NoRecordsError: the files are not here, or say nothing of that time.
        UnknownSubjectError: no such run or claim.
    """
    spans = read_spans(state_dir / SPANS)
    try:
        times = window(spans, looked_until_s(state_dir / SPANS), last_s)
    except ValueError as error:
        raise NoRecordsError(str(state_dir), str(error)) from None
    held = holdings(read_moves(state_dir / JOURNAL), times.until_s)
    if run is not None:
        return _run_report(state_dir, spans, held, times, run, run_dir)
    requests = read_totals(state_dir / "ledger", times.since_s, times.until_s)
    return {
        "cluster": True,
        "since_s": times.since_s,
        "until_s": times.until_s,
        **account(cluster_seconds(spans, times, requests["compute_s"]), requests),
        "runs": {
            name: _account_of(state_dir, spans, [row for row in held if row.run == name], times, 0.0)
            for name in dict.fromkeys(row.run for row in held if row.end_s > times.since_s)
        },
    }


def _run_report(
    state_dir: Path,
    spans: tuple[Span, ...],
    held: tuple[Holding, ...],
    times: Times,
    run: str,
    run_dir: Path | None,
) -> dict[str, Any]:
    mine = [row for row in held if run in (row.run, row.claim)]
    if not mine:
        raise UnknownSubjectError(run, tuple(dict.fromkeys(row.run for row in held)))
    waited_s = 0.0
    gang: dict[str, int] = {}
    interval: dict[str, float] | None = None
    if run_dir is not None:
        waited_s, gang, interval = _of_gang(run_dir, times)
    return {
        "cluster": False,
        "run": mine[0].run,
        "since_s": max(times.since_s, min(row.start_s for row in mine)),
        "until_s": min(times.until_s, max(row.end_s for row in mine)),
        **_account_of(state_dir, spans, mine, times, waited_s),
        **({"gang": gang} if gang else {}),
        **({"save_interval": interval} if interval else {}),
    }


def _account_of(
    state_dir: Path, spans: tuple[Span, ...], held: list[Holding], times: Times, waited_s: float
) -> dict[str, Any]:
    """Requests and money are those of the whole cluster while the run held GPUs: they were spilled for it."""
    requests: Counter[str] = Counter()
    for part in busy_times(held, times):
        requests.update(read_totals(state_dir / "ledger", part.since_s, part.until_s))
    return account(run_seconds(spans, held, times, waited_s), requests)


def _of_gang(run_dir: Path, times: Times) -> tuple[float, dict[str, int], dict[str, float] | None]:
    """GPU-seconds that ranks waited for checkpoints, what happened to the gang, and how often it should save."""
    # Only here: these two bring torch and Ray Train with them, which take seconds to import.
    from tidegate.gang.coordinator import JOURNAL as GANG_JOURNAL
    from tidegate.train.records import CHECKPOINTS

    lines = [line for line in read_lines(run_dir / GANG_JOURNAL) if _within(line, times)]
    commits = [row for row in read_lines(run_dir / CHECKPOINTS) if _within(row, times)]
    firsts = [line["data"] for line in lines if line["kind"] == "first_step"]
    counts = {
        "generations": len(firsts),
        "steps_done_again": sum(int(first["steps_lost"] or 0) for first in firsts),
        "checkpoints": len(commits),
    }
    faults = [line["at_s"] for line in lines if line["kind"] == "planned" and line["data"]["fault_at_s"] is not None]
    stalls = [float(row["stall_s"]) for row in commits]
    return stalled_s(commits), counts, save_interval(stalls, [float(row["at_s"]) for row in commits], len(faults))


def _within(row: dict[str, Any], times: Times) -> bool:
    return times.since_s <= float(row["at_s"]) < times.until_s
