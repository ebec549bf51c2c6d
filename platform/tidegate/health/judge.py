"""Readings in, verdicts out. Pure: what is remembered between two looks is the `History` that goes in and comes out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from pydantic import TypeAdapter

from tidegate.arbiter.messages import Verdict
from tidegate.health.readings import Reading, Signal, Status
from tidegate.health.rules import Rule, Seen, rules_of
from tidegate.ids import GpuId
from tidegate.spec.policy import HealthSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What one rule remembers of one subject. A subject that gives no reason to remember has none."""

    rule: str
    subject: str
    last_at_s: float
    """The newest reading that said anything."""
    bad_at_s: tuple[float, ...] = ()
    """The newest bad readings that count, at most as many as the rule takes."""
    bad_since_s: float | None = None
    """The first bad reading of the row that goes on."""
    good_since_s: float | None = None
    standing: Verdict | None = None


@dataclass(frozen=True, slots=True)
class History:
    traces: tuple[Trace, ...] = ()

    def to_json(self) -> bytes:
        return _HISTORY.dump_json(self)

    @staticmethod
    def from_json(text: bytes) -> History:
        """
        Raises:
            pydantic.ValidationError: the text is no history.
        """
        return _HISTORY.validate_json(text)

    def without(self, subject: str) -> History:
        """A person says that this subject is healthy: nothing is held against it."""
        return History(tuple(trace for trace in self.traces if trace.subject != subject))


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What was seen, in words. `text` is stable while the same thing goes on, so it can be logged when it changes."""

    at_s: float
    subject: str
    what: str
    """A rule's name, or the signal that can't be read."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    history: History
    findings: tuple[Finding, ...]
    verdicts: tuple[Verdict, ...]
    """All that stand, old and new, the oldest first."""


def judge(readings: Iterable[Reading], history: History, spec: HealthSpec, now_s: float) -> Judgement:
    """What the readings mean, given what is remembered.

    A reading that is missing, refused, implausible or too old to speak of now changes nothing: it raises no verdict and
    lifts none. Readings further apart than `gap_s` are not "in a row", for the bad and for the good.
    """
    gap = gap_s(spec)
    rules: dict[Signal, list[Rule]] = {}
    for rule in rules_of(spec):
        rules.setdefault(rule.signal, []).append(rule)
    known = {rule.name for rule in rules_of(spec)}
    # A rule that an upgrade took out of the table has nobody left to lift its verdicts.
    traces = {(trace.rule, trace.subject): trace for trace in history.traces if trace.rule in known}
    findings: list[Finding] = []
    for reading in readings:
        if now_s - reading.at_s > gap:
            continue
        concerned = rules.get(reading.signal, [])
        if concerned:
            findings += _unreadable(reading, concerned)
        for rule in concerned:
            key = (rule.name, reading.subject)
            before = traces.get(key)
            after = _advance(before, rule, reading, gap)
            findings += _changes(before, after, rule, reading)
            if after is None:
                traces.pop(key, None)
            else:
                traces[key] = after
    standing = [trace.standing for trace in traces.values() if trace.standing is not None]
    return Judgement(
        history=History(tuple(traces.values())),
        findings=tuple(findings),
        verdicts=tuple(sorted(standing, key=lambda verdict: (verdict.at_s, verdict.rule, verdict.gpu or ""))),
    )


def gap_s(spec: HealthSpec) -> float:
    """The longest rest between two readings that still follow each other: one look may be slow up to its deadline."""
    return spec.reading_deadline_s + 3 * spec.period_s


def _advance(trace: Trace | None, rule: Rule, reading: Reading, gap: float) -> Trace | None:
    """The trace after one reading; None when there is nothing left to remember."""
    seen = rule.bad.seen(reading)
    if seen is Seen.NOTHING or (trace is not None and reading.at_s == trace.last_at_s):
        return trace
    if trace is None:
        if seen is not Seen.BAD:
            return None
        trace = Trace(rule=rule.name, subject=reading.subject, last_at_s=reading.at_s)
    # Also when the clock was set back: what went before can't be compared then.
    if not 0 <= reading.at_s - trace.last_at_s <= gap:
        trace = replace(trace, bad_since_s=None, good_since_s=None, bad_at_s=_kept(trace, rule, reading, broken=True))
    trace = replace(trace, last_at_s=reading.at_s)
    if seen is Seen.BAD:
        return _raised(trace, rule, reading)
    trace = replace(trace, bad_since_s=None, bad_at_s=_kept(trace, rule, reading, broken=True))
    since = None
    if seen is Seen.GOOD:
        since = reading.at_s if trace.good_since_s is None else trace.good_since_s
    if since is not None and rule.release_after_s is not None and reading.at_s - since >= rule.release_after_s:
        trace = replace(trace, standing=None)
    trace = replace(trace, good_since_s=since)
    return trace if trace.standing is not None or trace.bad_at_s else None


def _raised(trace: Trace, rule: Rule, reading: Reading) -> Trace:
    bad_at_s = (*_kept(trace, rule, reading, broken=False), reading.at_s)[-rule.samples :]
    since = reading.at_s if trace.bad_since_s is None else trace.bad_since_s
    enough = len(bad_at_s) >= rule.samples and reading.at_s - since >= rule.for_s
    verdict = trace.standing or (_verdict(rule, reading, since) if enough else None)
    return replace(trace, bad_at_s=bad_at_s, bad_since_s=since, good_since_s=None, standing=verdict)


def _kept(trace: Trace, rule: Rule, reading: Reading, *, broken: bool) -> tuple[float, ...]:
    """The bad readings that still count: a row is over when it breaks, a window moves on with time."""
    if rule.within_s is None:
        return () if broken else trace.bad_at_s
    return tuple(at_s for at_s in trace.bad_at_s if 0 <= reading.at_s - at_s <= rule.within_s)


def _verdict(rule: Rule, reading: Reading, since_s: float) -> Verdict:
    times = f", {rule.samples} times" if rule.samples > 1 else ""
    span = f" within {rule.within_s:g} s" if rule.within_s is not None else ""
    lasting = f", for {reading.at_s - since_s:.0f} s" if rule.for_s else ""
    return Verdict(
        at_s=reading.at_s,
        node=reading.node,
        gpu=None if reading.subject == reading.node else GpuId(reading.subject),
        rule=rule.name,
        action=rule.action,
        when=rule.when,
        tier=rule.tier,
        evidence=f"{rule.bad.evidence(reading)}{times}{span}{lasting}",
        ends=rule.ends,
    )


def _unreadable(reading: Reading, rules: list[Rule]) -> list[Finding]:
    """A value that should be there and isn't. Unsupported is no finding: that GPU has no such value, and never will."""
    if reading.status is Status.UNSUPPORTED:
        return []
    if reading.status is not Status.OK:
        text = f"no {reading.signal}: {reading.status}" + (f" ({reading.cause})" if reading.cause else "")
    elif any(rule.bad.seen(reading) is Seen.NOTHING for rule in rules):
        text = f"{reading.signal} of {reading.value} can't be true; counts as no reading"
    else:
        return []
    return [Finding(at_s=reading.at_s, subject=reading.subject, what=reading.signal, text=text)]


def _changes(before: Trace | None, after: Trace | None, rule: Rule, reading: Reading) -> list[Finding]:
    old = before.standing if before is not None else None
    new = after.standing if after is not None else None
    if old is None and new is not None:
        text = f"{new.action} {new.when}: {new.evidence}; ends: {new.ends}"
    elif old is not None and new is None:
        text = f"lifted: {old.ends}"
    elif after is not None and after is not before and new is None and after.bad_since_s is not None:
        text = f"over its limit, not yet {rule.action}"
    else:
        return []
    return [Finding(at_s=reading.at_s, subject=reading.subject, what=rule.name, text=text)]


_HISTORY: TypeAdapter[History] = TypeAdapter(History)
