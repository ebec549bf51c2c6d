"""What a soak must show, judged from its records. Pure.

Losses are compared with a run of the same config that nothing happened to. `metrics.jsonl` has a line a step for every
generation, so steps that were done again stand there more than once; the newest generation's line is the one that
counts, since its step is what the weights came from.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    name: str
    holds: bool
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """One run's losses beside the undisturbed one's."""

    steps: int
    missing: tuple[int, ...]
    """Steps that no generation recorded."""
    doubled: tuple[int, ...]
    """Steps that one generation recorded twice."""
    backwards: tuple[int, ...]
    """Steps whose line is of an older generation than the step's before: a dead generation wrote on."""
    exact_steps: int
    """How many from the first on have the same loss to the last recorded digit."""
    same_size_steps: int
    """How many from the first on were made by as many ranks as the undisturbed run's."""
    worst: float
    """The largest |difference| of a later step's mean loss over `WINDOW` steps, relative to the undisturbed one's."""
    worst_step: int


WINDOW = 50
"""One step's loss swings with its samples; the curve is the mean over so many."""


def compare(rows: Iterable[Row], undisturbed: Iterable[Row], steps: int) -> Curves:
    """
    Raises:
        ValueError: the undisturbed run does not have every step once.
    """
    ours = list(rows)
    theirs = {row["step"]: row for row in undisturbed}
    absent = [step for step in range(1, steps + 1) if step not in theirs]
    if absent:
        raise ValueError(f"the undisturbed run has no step {absent[0]}")
    counted = Counter((row["step"], row["generation"]) for row in ours)
    kept = newest(ours)
    present = [step for step in range(1, steps + 1) if step in kept]
    exact = _prefix(present, lambda step: kept[step]["loss"] == theirs[step]["loss"])
    same_size = _prefix(present, lambda step: kept[step]["world_size"] == theirs[step]["world_size"])
    worst, worst_step = _worst(kept, theirs, present)
    return Curves(
        steps=steps,
        missing=tuple(step for step in range(1, steps + 1) if step not in kept),
        doubled=tuple(sorted({step for (step, _), times in counted.items() if times > 1})),
        backwards=tuple(
            after
            for before, after in itertools.pairwise(present)
            if kept[after]["generation"] < kept[before]["generation"]
        ),
        exact_steps=exact,
        same_size_steps=same_size,
        worst=worst,
        worst_step=worst_step,
    )


def newest(rows: Iterable[Row]) -> dict[int, Row]:
    """Each step's line by the newest generation that made it."""
    kept: dict[int, Row] = {}
    for row in rows:
        standing = kept.get(row["step"])
        if standing is None or row["generation"] >= standing["generation"]:
            kept[row["step"]] = row
    return kept


def curve_checks(curves: Curves, tolerance: float) -> tuple[Check, ...]:
    whole = not (curves.missing or curves.doubled or curves.backwards)
    return (
        Check(
            name="every step once",
            holds=whole,
            detail=f"{curves.steps} steps"
            if whole
            else f"missing {curves.missing[:5]}, doubled {curves.doubled[:5]}, by a dead generation"
            f" {curves.backwards[:5]}",
        ),
        Check(
            name="losses bit-identical while the world size is the undisturbed run's",
            holds=curves.exact_steps >= curves.same_size_steps,
            detail=f"{curves.exact_steps} steps the same to the last digit, {curves.same_size_steps} of the same size",
        ),
        Check(
            name=f"loss curve within {tolerance:.1%} afterwards",
            holds=curves.worst <= tolerance,
            detail=f"worst {curves.worst:.3%} at step {curves.worst_step}, means over {WINDOW} steps",
        ),
    )


def request_checks(
    client: Sequence[Row], totals: Mapping[str, float], ended: Mapping[str, int], asked: int
) -> tuple[Check, ...]:
    """
    Args:
        client: the client's own lines, one a request.
        totals: the ledgers' sums.
        ended: request id -> how many ledger rows say that it ended.
        asked: requests that the client sent.
    """
    problems = [row for row in client if row["problem"] is not None]
    first = f", first: {problems[0]['problem']}" if problems else ""
    ids = [row["request_id"] for row in client]
    not_once = [one for one in ids if ended.get(one) != 1]
    return (
        Check(name="no failed request", holds=not problems, detail=f"{len(problems)} of {len(client)}{first}"),
        Check(
            name="every request ended exactly once",
            holds=not not_once and len(set(ids)) == len(ids) == asked and totals["open"] == 0,
            detail=f"{asked} sent, {len(set(ids))} ids, {len(not_once)} not ended once, {totals['open']:.0f} open",
        ),
        Check(
            name="the ledger's sums agree",
            holds=totals["sent"]
            == sum(totals[end] for end in ("local", "spilled", "refused", "cancelled", "failed", "open")),
            detail=", ".join(f"{end} {totals[end]:.0f}" for end in ("sent", "local", "spilled", "refused", "failed")),
        ),
    )


def goodput_checks(
    shares: Mapping[str, float], counted_gpu_s: float, there_gpu_s: float, slack: float
) -> tuple[Check, ...]:
    """
    Args:
        shares: owner -> its part of all GPU-seconds.
        counted_gpu_s: what the ledger has an owner for.
        there_gpu_s: GPUs that were there × seconds, by what the soak did to nodes itself.
        slack: of `there_gpu_s`: a killed node counts until GCS has noticed.
    """
    total = sum(shares.values())
    return (
        Check(name="goodput sums to 1", holds=abs(total - 1) < 1e-6, detail=f"{total:.9f}"),
        Check(
            name="every GPU-second has an owner",
            holds=abs(counted_gpu_s / there_gpu_s - 1) <= slack,
            detail=f"{counted_gpu_s:.0f} GPU-seconds have an owner, {there_gpu_s:.0f} were there (slack {slack:.1%})",
        ),
    )


def _prefix(steps: Sequence[int], holds: Callable[[int], bool]) -> int:
    count = 0
    for step in steps:
        if not holds(step):
            break
        count += 1
    return count


def _worst(kept: Mapping[int, Row], theirs: Mapping[int, Row], steps: Sequence[int]) -> tuple[float, int]:
    worst, at = 0.0, 0
    for begin in range(0, len(steps), WINDOW):
        window = [
            s for s in steps[begin : begin + WINDOW] if kept[s]["loss"] is not None and theirs[s]["loss"] is not None
        ]
        if not window:
            continue
        mine = sum(kept[step]["loss"] for step in window) / len(window)
        other = sum(theirs[step]["loss"] for step in window) / len(window)
        off = abs(mine - other) / abs(other)
        if off > worst:
            worst, at = off, window[0]
    return worst, at
