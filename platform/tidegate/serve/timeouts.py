"""How long an attempt at a provider may take, and whether that is enough. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

KEPT = 64
"""Newest attempts that are looked at."""

FEW = 20
"""Fewer say nothing of a tail."""

TIGHT = 0.9
"""Of the time-out: a 95th percentile above it means that good pictures are being given up."""


def attempt_s(timeout_s: float, deadline_s: float, now_s: float) -> float:
    """Seconds for the next attempt: the provider's own time-out, and never beyond the request's deadline, which all
    attempts share."""
    return min(timeout_s, deadline_s - now_s)


def too_tight(timeout_s: float, took_s: Sequence[float]) -> str | None:
    """A warning where answers come so late that the next ones will be cut off (C164); None where all is well.

    `took_s`: seconds of the newest successful attempts, oldest first.
    """
    newest = took_s[-KEPT:]
    if len(newest) < FEW:
        return None
    p95_s = statistics.quantiles(newest, n=20)[-1]
    if p95_s <= TIGHT * timeout_s:
        return None
    return f"timeout_s {timeout_s:g} is too short: one answer in twenty takes over {p95_s:.1f} s; raise timeout_s"
