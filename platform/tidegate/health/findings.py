"""What is told to people of a look: what can't be read, what begins, what ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tidegate.health.conditions import Above
from tidegate.health.history import Trace
from tidegate.health.readings import Reading, Status
from tidegate.health.rule import Rule
from tidegate.health.values import value_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What was seen, in words. `text` is stable while the same thing goes on, so it can be logged when it changes."""

    at_s: float
    subject: str
    what: str
    """A rule's name, or the signal that can't be read."""
    text: str


def unreadable(reading: Reading, rules: Sequence[Rule]) -> list[Finding]:
    """A value that should be there and isn't. Unsupported is no finding: that GPU has no such value, and never will."""
    if reading.status is Status.UNSUPPORTED:
        return []
    if reading.status is not Status.OK:
        text = f"no {reading.signal}: {reading.status}" + (f" ({reading.cause})" if reading.cause else "")
    elif value_of(reading) is None or any(
        isinstance(rule.bad, Above) and (reading.value or 0) > rule.bad.plausible_up_to for rule in rules
    ):
        text = f"{reading.signal} of {reading.value} can't be true; counts as no reading"
    else:
        return []
    return [Finding(at_s=reading.at_s, subject=reading.subject, what=reading.signal, text=text)]


def changes(before: Trace | None, after: Trace | None, rule: Rule, reading: Reading) -> list[Finding]:
    old = before.standing if before is not None else None
    new = after.standing if after is not None else None
    if old is None and new is not None:
        text = f"{new.action} {new.when}: {new.evidence}; ends: {new.ends}"
    elif old is not None and new is None:
        text = f"lifted: {old.ends}"
    elif after is not None and new is None and after.bad_since_s is not None:
        text = f"over its limit, not yet {rule.action}"
    else:
        return []
    return [Finding(at_s=reading.at_s, subject=reading.subject, what=rule.name, text=text)]
