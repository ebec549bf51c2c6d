"""Readings in, verdicts out. Pure: what is remembered between two looks is the `History` that goes in and comes out."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from tidegate.arbiter.messages import Action, Verdict, When
from tidegate.health.conditions import FEWEST_PEERS, Above, Among, Around, Peers, Seen
from tidegate.health.history import REPEAT_OFFENDER, Count, History, Key, Level, Subject, Trace
from tidegate.health.listening import Listening, plan_of
from tidegate.health.readings import CEILINGS, EVENTS, Reading, Signal, Status
from tidegate.health.rule import LATCHED, Rule
from tidegate.health.rules import gap_s
from tidegate.health.table import EDGE
from tidegate.health.values import BOUNDS, SENTINELS, value_of
from tidegate.ids import ClaimId, GpuId, Tier
from tidegate.spec.policy import HealthSpec

_ECHO_S = 10.0
_EXCUSE_S = 120.0
_ONE_FAULT_S = 600.0
"""Rules that find a subject bad within this time have found one fault."""
_PROBATION_DAY_S = 86_400.0
_LONGEST_REST_S = 86_400.0
_LONG_WINDOW_S = 600.0
_LINKS_OF = "nvlinks of "
"""Beside the ports: nodes on which a GPU had all of its NVLinks up once. Cards without a bridge show theirs as down."""
_MOST_RISES = 512


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
    worth_saving: bool
    """Something changed that a restart should know: a verdict, or one more of what counts over hours."""


def judge(
    readings: Iterable[Reading],
    history: History,
    spec: HealthSpec,
    now_s: float,
    gangs: Mapping[GpuId, ClaimId] | None = None,
) -> Judgement:
    """What the readings mean, given what is remembered.

    A reading that is missing, refused, implausible or too old to speak of now changes nothing: it raises no verdict and
    lifts none. Readings further apart than `gap_s` are not "in a row", for the bad and for the good.

    `gangs` says which gang a GPU works in; only GPUs of one gang are compared with each other.
    """
    look = _Look(spec, history, now_s, gangs or {})
    look.take(readings)
    return look.judgement(history)


class _Look:
    """One call of `judge`: the working copy of the history, and what the readings of this look say together."""

    def __init__(self, spec: HealthSpec, history: History, now_s: float, gangs: Mapping[GpuId, ClaimId]) -> None:
        self._spec, self._now_s, self._gangs = spec, now_s, gangs
        plan = plan_of(spec, bool(gangs))
        self._heard = plan.heard
        # A rule that an upgrade took out of the table has nobody left to lift its verdicts.
        self._traces = {key: trace for key, trace in history.traces.items() if key.rule in plan.known}
        self._counts, self._levels = dict(history.counts), dict(history.levels)
        self._ports = set(history.ports)
        self._evicted_at_s = dict(history.evicted_at_s)
        self._marked = {trace.subject for trace in self._traces.values()}
        self._among: dict[Signal, list[Reading]] = {}
        self._peers: dict[tuple[str, str], Peers | None] = {}
        self._calm_of_peers: dict[tuple[Signal, str], tuple[float, float]] = {}
        self._findings: list[Finding] = []
        self._worth_saving = False

    def judgement(self, before: History) -> Judgement:
        standing = [trace.standing for trace in self._traces.values() if trace.standing is not None]
        was = {key: trace.standing for key, trace in before.traces.items() if trace.standing is not None}
        now = {key: trace.standing for key, trace in self._traces.items() if trace.standing is not None}
        ports = frozenset(self._ports)
        return Judgement(
            history=History(self._traces, self._counts, self._levels, ports, self._evicted_at_s),
            findings=tuple(self._findings),
            verdicts=tuple(sorted(standing, key=lambda verdict: (verdict.at_s, verdict.rule, verdict.gpu or ""))),
            worth_saving=self._worth_saving or was != now or ports != before.ports,
        )

    # Take in

    def take(self, readings: Iterable[Reading]) -> None:
        waiting: list[tuple[Reading, Listening]] = []
        events: list[tuple[Reading, Listening]] = []
        held: set[Subject] = set()
        now_s, heard, marked, counts = self._now_s, self._heard, self._marked, self._counts
        for reading in readings:
            listens = heard.get(reading.signal)
            if listens is None or now_s - reading.at_s > listens.fresh_s:
                continue
            value, subject = reading.value, reading.subject
            if value is not None and reading.status is Status.OK:
                if listens.is_level:
                    self._keep_level(reading)
                # One that is bad may be followed by its own good one in the same look.
                if subject not in marked and not (held and (reading.signal, subject) in held):
                    # By far the most readings end here: nothing is held against the subject, and nothing is new.
                    if listens.low <= value <= listens.high and not int(value) & listens.bits:
                        continue
                    if listens.counts_only:
                        count = counts.get((reading.signal, subject))
                        if (
                            count is not None
                            and value == count.value
                            and not count.risen
                            and 0 < reading.at_s - count.at_s <= listens.gap_s
                        ):
                            counts[reading.signal, subject] = Count(reading.at_s, value)
                            continue
            if listens.among:
                self._among.setdefault(reading.signal, []).append(reading)
            else:
                held.add((reading.signal, subject))
            (events if reading.signal in EVENTS else waiting).append((reading, listens))
        # What happened explains what is seen, so it goes first.
        for reading, listens in chain(events, waiting):
            self._judge(reading, listens)

    def _keep_level(self, reading: Reading) -> None:
        value = reading.value
        low, high = BOUNDS[reading.signal]
        if value is None or not low <= value <= high or value in SENTINELS:
            return
        if reading.signal is Signal.IB_PORT_STATE and value == 4:
            self._ports.add(reading.subject)
        if reading.signal is Signal.GPU_NVLINKS_DOWN and value == 0:
            links = self._levels.get((Signal.GPU_NVLINKS, reading.subject))
            if links is not None and links.value > 0:
                self._ports.add(_LINKS_OF + reading.node)
        if reading.signal is Signal.GPU_XID and value == 45:
            return  # an echo is no news
        self._levels[reading.signal, reading.subject] = Level(reading.at_s, value)

    def _judge(self, reading: Reading, listens: Listening) -> None:
        if listens.among and reading.subject not in self._marked and self._is_among_calm(reading, listens.rules):
            return
        fresh = self._counted(reading, listens)
        if listens.rules:
            self._findings.extend(_unreadable(reading, listens.rules))
        for rule in listens.rules:
            around = Around(
                other=lambda signal: self._other(signal, reading.subject),
                risen=lambda within_s: self._risen(reading, within_s) if fresh else None,
                peers=lambda rule=rule: self._peers_of(rule, reading),  # type: ignore[misc]
            )
            self._advance(rule, reading, self._seen(rule, reading, around), around)
        if listens.cleans and reading.subject in self._marked and value_of(reading) is not None:
            events = [trace for trace in self._traces.values() if trace.subject == reading.subject]
            for trace in (trace for trace in events if trace.rule in listens.cleans):
                self._step(trace.key, listens.cleans[trace.rule], reading, Seen.GOOD, None)

    def _seen(self, rule: Rule, reading: Reading, around: Around) -> Seen:
        if rule.port and not self._is_needed_port(reading):
            return Seen.NOTHING
        seen = rule.bad.seen(reading, around)
        if seen is Seen.BAD and not all(guard.holds(around) for guard in rule.while_):
            return Seen.NOTHING
        if seen is Seen.BAD and rule.excused_by and self._is_excused(rule, reading):
            return Seen.NOTHING
        return seen

    def _is_needed_port(self, reading: Reading) -> bool:
        subject = reading.subject
        if reading.signal.of_gpu:
            return _LINKS_OF + reading.node in self._ports
        if self._spec.ib_ports:
            return subject in self._spec.ib_ports
        ethernet = self._levels.get((Signal.IB_PORT_ETHERNET, subject))
        return subject in self._ports and (ethernet is None or ethernet.value == 0)

    def _is_excused(self, rule: Rule, reading: Reading) -> bool:
        xid = self._levels.get((Signal.GPU_XID, reading.subject))
        if "any_xid" in rule.excused_by and xid is not None and abs(reading.at_s - xid.at_s) <= _ECHO_S:
            return True
        traces = (self._traces.get(Key(name, reading.subject)) for name in rule.excused_by)
        return any(
            (trace is not None and trace.was_bad and reading.at_s - trace.last_at_s <= _EXCUSE_S)
            or (trace is not None and any(reading.at_s - at_s <= _EXCUSE_S for at_s in trace.bad_at_s))
            for trace in traces
        )

    # What is known beside a reading

    def _other(self, signal: Signal, subject: str) -> float | None:
        level = self._levels.get((signal, subject))
        return level.value if level is not None and self._now_s - level.at_s <= gap_s(self._spec, signal) else None

    def _counted(self, reading: Reading, listens: Listening) -> bool:
        """Take a counter's value in; whether what it rose by can be told."""
        value = value_of(reading) if listens.counts else None
        if value is None:
            return False
        key: Subject = (reading.signal, reading.subject)
        count = self._counts.get(key)
        if count is None:
            self._counts[key] = Count(reading.at_s, value)
            return False
        risen = tuple(rise for rise in count.risen if 0 <= reading.at_s - rise[0] < listens.longest_s)
        if reading.at_s == count.at_s:
            return False
        if not 0 < reading.at_s - count.at_s <= listens.gap_s:
            # Over a gap it may have been reset, or have risen at any time: it is a new beginning.
            self._counts[key] = Count(reading.at_s, value, risen)
            return False
        # One that went down was reset, and has come so far since.
        delta = value - count.value if value >= count.value else value
        if delta:
            risen = (*risen, (reading.at_s, delta))[-_MOST_RISES:]
        self._counts[key] = Count(reading.at_s, value, risen)
        # At its ceiling it is blind: what rose up to there counts, standing still there says nothing.
        return not (value >= CEILINGS.get(reading.signal, float("inf")) and delta == 0)

    def _risen(self, reading: Reading, within_s: float) -> float:
        count = self._counts[reading.signal, reading.subject]
        return sum(delta for at_s, delta in count.risen if reading.at_s - at_s < within_s)

    def _group(self, rule: Rule, reading: Reading) -> str | None:
        return self._gangs.get(GpuId(reading.subject)) if rule.gang else reading.node

    def _peers_of(self, rule: Rule, reading: Reading) -> Peers | None:
        group = self._group(rule, reading)
        if group is None:
            return None
        key = (rule.name, group)
        if key not in self._peers:
            members: dict[str, list[float]] = {}
            for other in self._among.get(rule.signal, ()):
                value, its = value_of(other), self._group(rule, other)
                if value is not None and its is not None and self._is_at_work(rule, other.subject):
                    members.setdefault(its, []).append(value)
            for its, values in members.items():
                self._peers[rule.name, its] = _peers(values)
            self._peers.setdefault(key, None)
        return self._peers[key]

    def _is_at_work(self, rule: Rule, subject: str) -> bool:
        for guard in rule.while_:
            value = self._other(guard.signal, subject)
            if value is None or not guard.at_least <= value <= guard.at_most:
                return False
        return True

    def _is_among_calm(self, reading: Reading, rules: Sequence[Rule]) -> bool:
        """Whether the value is near enough to its peers' for all rules; worked out once for each gang."""
        group = self._group(rules[0], reading)
        value = value_of(reading)
        if value is None or group is None:
            return False
        calm = self._calm_of_peers.get((reading.signal, group))
        if calm is None:
            low, high = float("-inf"), float("inf")
            for rule in rules:
                peers = self._peers_of(rule, reading)
                if isinstance(rule.bad, Among) and peers is not None:
                    edge = rule.bad.limit * peers.median
                    low, high = (max(low, edge), high) if rule.bad.limit < 1 else (low, min(high, edge))
            calm = self._calm_of_peers[reading.signal, group] = (low, high)
        return calm[0] <= value <= calm[1]

    # Go on from what is remembered

    def _advance(self, rule: Rule, reading: Reading, seen: Seen, around: Around) -> None:
        kind = ""
        if rule.same is not None:
            found = re.search(rule.same, reading.detail or "")
            kind = found[1] if found is not None else ""
        self._step(Key(rule.name, reading.subject, kind), rule, reading, seen, around)

    def _step(self, key: Key, rule: Rule, reading: Reading, seen: Seen, around: Around | None) -> None:
        before = self._traces.get(key)
        after = self._after(before, key, rule, reading, seen, around)
        if after is before:
            return
        self._findings.extend(_changes(before, after, rule, reading))
        if after is None:
            self._traces.pop(key, None)
            return
        self._traces[key] = after
        self._marked.add(key.subject)
        long = rule.within_s is not None and rule.within_s >= _LONG_WINDOW_S
        self._worth_saving |= long and (before is None or after.bad_at_s != before.bad_at_s)
        new = after.standing
        if new is not None and (before is None or before.standing is None) and new.action is not Action.WARN:
            self._note_eviction(new, key.subject)

    def _after(
        self, trace: Trace | None, key: Key, rule: Rule, reading: Reading, seen: Seen, around: Around | None
    ) -> Trace | None:
        """The trace after one reading; None when there is nothing left to remember."""
        if seen is Seen.NOTHING or (trace is not None and reading.at_s == trace.last_at_s):
            return trace
        if trace is None:
            if seen is not Seen.BAD:
                return None
            trace = Trace(
                rule=rule.name, subject=reading.subject, node=reading.node, kind=key.kind, last_at_s=reading.at_s
            )
        # Also when the clock was set back: what went before can't be compared then.
        if not 0 <= reading.at_s - trace.last_at_s <= gap_s(self._spec, reading.signal):
            kept = _kept(trace, rule, reading, broken=True)
            trace = replace(trace, bad_since_s=None, good_since_s=None, bad_at_s=kept)
        trace = replace(trace, last_at_s=reading.at_s)
        if seen is Seen.BAD:
            assert around is not None
            return self._raised(trace, rule, reading, around)
        kept = _kept(trace, rule, reading, broken=True)
        trace = replace(trace, bad_since_s=None, bad_at_s=kept, was_bad=False)
        since = None
        if seen is Seen.GOOD:
            since = reading.at_s if trace.good_since_s is None else trace.good_since_s
        may_end = since is not None and rule.release_after_s is not None
        if may_end and reading.at_s - since >= self._rest_s(rule, trace):  # type: ignore[operator]
            trace = replace(trace, standing=None)
        trace = replace(trace, good_since_s=since)
        return trace if trace.standing is not None or trace.bad_at_s else None

    def _raised(self, trace: Trace, rule: Rule, reading: Reading, around: Around) -> Trace:
        bad_at_s = _kept(trace, rule, reading, broken=False)
        if _counts_again(trace, rule, reading, bad_at_s):
            bad_at_s = (*bad_at_s, reading.at_s)[-rule.samples :]
        since = reading.at_s if trace.bad_since_s is None else trace.bad_since_s
        enough = len(bad_at_s) >= rule.samples and reading.at_s - since >= rule.for_s
        enough = enough and (not rule.witness or any(self._finds_bad(name, reading) for name in rule.witness))
        verdict = trace.standing or (_verdict(rule, reading, since, around) if enough else None)
        return replace(trace, bad_at_s=bad_at_s, bad_since_s=since, good_since_s=None, was_bad=True, standing=verdict)

    def _finds_bad(self, rule: str, reading: Reading) -> bool:
        trace = self._traces.get(Key(rule, reading.subject))
        return trace is not None and trace.standing is not None and trace.was_bad

    def _rest_s(self, rule: Rule, trace: Trace) -> float:
        """How long it must stay good: doubled for each time that it was taken out within a day before."""
        rest_s = rule.release_after_s or 0.0
        if rule.action is Action.WARN or trace.standing is None:
            return rest_s
        at_s = trace.standing.at_s
        earlier = sum(0 < at_s - then_s <= _PROBATION_DAY_S for then_s in self._evicted_at_s.get(trace.subject, ()))
        return max(rest_s, min(rest_s * 2.0**earlier, _LONGEST_REST_S))

    def _note_eviction(self, verdict: Verdict, subject: str) -> None:
        limit = self._spec.repeat_offender
        times = self._evicted_at_s.get(subject, ())
        if times and verdict.at_s - times[-1] < _ONE_FAULT_S:
            return
        times = (*(at_s for at_s in times if verdict.at_s - at_s <= limit.within_s), verdict.at_s)
        self._evicted_at_s[subject] = times
        self._worth_saving = True
        key = Key(REPEAT_OFFENDER, subject)
        if len(times) < limit.evictions or key in self._traces:
            return
        days = limit.within_s / 86_400
        offender = replace(
            verdict,
            rule=REPEAT_OFFENDER,
            action=Action.EVICT_GPU if verdict.action is Action.EVICT_GPU else Action.EVICT_NODE,
            when=When.NOW,
            tier=Tier.NONE,
            evidence=f"taken out {len(times)} times within {days:g} days, now by {verdict.rule}: {verdict.evidence}",
            ends="a person sets it healthy; a reboot does not",
        )
        self._traces[key] = Trace(
            rule=REPEAT_OFFENDER, subject=subject, node=verdict.node, last_at_s=verdict.at_s, standing=offender
        )


def _peers(values: Sequence[float]) -> Peers | None:
    if len(values) < FEWEST_PEERS:
        return None
    median = statistics.median(values)
    return Peers(count=len(values), median=median, mad=statistics.median(abs(value - median) for value in values))


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


def _unreadable(reading: Reading, rules: Sequence[Rule]) -> list[Finding]:
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


def _changes(before: Trace | None, after: Trace | None, rule: Rule, reading: Reading) -> list[Finding]:
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


__all__ = ["Finding", "History", "Judgement", "gap_s", "judge"]
