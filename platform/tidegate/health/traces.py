"""How one rule's memory of one subject goes on with one more reading. Pure."""

from __future__ import annotations

from dataclasses import replace

from tidegate.arbiter.messages import Verdict
from tidegate.health.evidence import Around, Seen
from tidegate.health.history import Key, Trace
from tidegate.health.readings import Reading
from tidegate.health.rule import EDGE, LATCHED, Rule
from tidegate.ids import GpuId


def trace_after(
    trace: Trace | None,
    key: Key,
    rule: Rule,
    reading: Reading,
    seen: Seen,
    *,
    gap_s: float,
    rest_s: float,
    witnessed: bool,
    around: Around | None,
) -> Trace | None:
    """The trace after one reading; None when there is nothing left to remember.

    `gap_s`: readings further apart do not follow each other. `rest_s`: how long it must stay good for its verdict to
    go. `around`: None of a reading that can only be good.
    """
    if seen is Seen.NOTHING or (trace is not None and reading.at_s == trace.last_at_s):
        return trace
    if trace is None:
        if seen is not Seen.BAD:
            return None
        trace = Trace(rule=rule.name, subject=reading.subject, node=reading.node, kind=key.kind, last_at_s=reading.at_s)
    # Also when the clock was set back: what went before can't be compared then.
    if not 0 <= reading.at_s - trace.last_at_s <= gap_s:
        kept = _kept(trace, rule, reading, broken=True)
        trace = replace(trace, bad_since_s=None, good_since_s=None, bad_at_s=kept)
    trace = replace(trace, last_at_s=reading.at_s)
    if seen is Seen.BAD:
        assert around is not None
        return _raised(trace, rule, reading, around, witnessed=witnessed)
    kept = _kept(trace, rule, reading, broken=True)
    trace = replace(trace, bad_since_s=None, bad_at_s=kept, was_bad=False)
    since = None
    if seen is Seen.GOOD:
        since = reading.at_s if trace.good_since_s is None else trace.good_since_s
    if since is not None and rule.release_after_s is not None and reading.at_s - since >= rest_s:
        trace = replace(trace, standing=None)
    trace = replace(trace, good_since_s=since)
    return trace if trace.standing is not None or trace.bad_at_s else None


def _raised(trace: Trace, rule: Rule, reading: Reading, around: Around, *, witnessed: bool) -> Trace:
    bad_at_s = _kept(trace, rule, reading, broken=False)
    if _counts_again(trace, rule, reading, bad_at_s):
        bad_at_s = (*bad_at_s, reading.at_s)[-rule.samples :]
    since = reading.at_s if trace.bad_since_s is None else trace.bad_since_s
    enough = witnessed and len(bad_at_s) >= rule.samples and reading.at_s - since >= rule.for_s
    verdict = trace.standing or (_verdict(rule, reading, since, around) if enough else None)
    return replace(trace, bad_at_s=bad_at_s, bad_since_s=since, good_since_s=None, was_bad=True, standing=verdict)


def _kept(trace: Trace, rule: Rule, reading: Reading, *, broken: bool) -> tuple[float, ...]:
    """The bad readings that still count: a row is over when it breaks, a window moves on with time."""
    if rule.within_s is None:
        return () if broken else trace.bad_at_s
    return tuple(at_s for at_s in trace.bad_at_s if 0 <= reading.at_s - at_s <= rule.within_s)


def _counts_again(trace: Trace, rule: Rule, reading: Reading, bad_at_s: tuple[float, ...]) -> bool:
    if rule.apart_s == EDGE:
        return not trace.was_bad
    return not bad_at_s or reading.at_s - bad_at_s[-1] >= rule.apart_s


def _verdict(rule: Rule, reading: Reading, since_s: float, around: Around) -> Verdict:
    of_gpu = reading.signal.of_gpu
    what = "" if of_gpu or reading.subject == reading.node else f"{reading.subject}: "
    times = f", {rule.samples} times" if rule.samples > 1 else ""
    span = f" within {rule.within_s:g} s" if rule.within_s is not None else ""
    lasting = f", for {reading.at_s - since_s:.0f} s" if rule.for_s else ""
    said = rule.bad.evidence(reading, around)
    if reading.detail is not None and reading.detail not in said:
        said += f" ({reading.detail})"
    return Verdict(
        at_s=reading.at_s,
        node=reading.node,
        gpu=GpuId(reading.subject) if of_gpu else None,
        rule=rule.name,
        action=rule.action,
        when=rule.when,
        tier=rule.tier,
        evidence=f"{what}{said}{times}{span}{lasting}",
        ends=rule.ends or LATCHED,
    )
