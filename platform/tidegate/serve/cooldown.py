"""When a provider that failed may be tried again."""

from __future__ import annotations

from dataclasses import dataclass

RETRY_AFTER_MAX_S = 600.0
"""A provider that asks for more is asked again after this anyway; its answer may have changed."""


@dataclass(frozen=True, slots=True)
class Cooldown:
    """One provider's trouble. A fresh value is a provider in good standing."""

    failures: int = 0
    """In a row."""
    until_s: float = 0.0
    reason: str = ""

    def resting(self, now_s: float) -> bool:
        return now_s < self.until_s

    def slots(self, slots: int) -> int:
        """How many requests it may hold: after a failure one at a time, until one succeeds (a half-open breaker)."""
        return 1 if self.failures else slots


def failed(before: Cooldown, now_s: float, *, cooldown_s: float, retry_after_s: float | None, reason: str) -> Cooldown:
    """Each failure rests the provider at once: by its own `Retry-After`, else `cooldown_s`. An earlier, longer rest
    that still runs is kept, so a late answer of a slow request never shortens it."""
    rest_s = cooldown_s if retry_after_s is None else min(max(retry_after_s, 0.0), RETRY_AFTER_MAX_S)
    return Cooldown(before.failures + 1, max(before.until_s, now_s + rest_s), reason)


def answered(before: Cooldown, now_s: float) -> Cooldown:
    """A success ends the trouble, unless it was sent before a rest that still runs."""
    return before if before.resting(now_s) else Cooldown()
