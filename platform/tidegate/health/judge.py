"""Readings in, verdicts out. Pure: what is remembered between two looks is the `History` that goes in and comes out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain

from tidegate.arbiter.messages import Action, Verdict, When
from tidegate.health.counting import counted, risen
from tidegate.health.crowd import Crowd
from tidegate.health.evidence import Around, Peers, Seen
from tidegate.health.findings import Finding, changes, unreadable
from tidegate.health.history import REPEAT_OFFENDER, Count, History, Key, Level, Subject, Trace
from tidegate.health.listening import Listening, plan_of
from tidegate.health.readings import EVENTS, Reading, Signal, Status
from tidegate.health.rule import Rule
from tidegate.health.rules import gap_s
from tidegate.health.traces import trace_after
from tidegate.health.values import SENTINELS, value_of
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
    whole: Mapping[tuple[ClaimId, Signal], Peers] | None = None,
) -> Judgement:
    """What the readings mean, given what is remembered.

    A reading that is missing, refused, implausible or too old to speak of now changes nothing: it raises no verdict and
    lifts none. Readings further apart than `gap_s` are not "in a row", for the bad and for the good.

    `gangs` says which gang a GPU works in; only GPUs of one gang are compared with each other. `whole` says what a
    gang's GPUs do on all of its nodes; of signals that it does not name, these readings are all that is compared.
    """
    look = _Look(spec, history, now_s, gangs or {}, whole or {})
    look.take(readings)
    return look.judgement(history)


class _Look:
    """One call of `judge`: the working copy of the history, and what the readings of this look say together."""

    def __init__(
        self,
        spec: HealthSpec,
        history: History,
        now_s: float,
        gangs: Mapping[GpuId, ClaimId],
        whole: Mapping[tuple[ClaimId, Signal], Peers],
    ) -> None:
        self._spec, self._now_s = spec, now_s
        plan = plan_of(spec, bool(gangs))
        self._heard = plan.heard
        # A rule that an upgrade took out of the table has nobody left to lift its verdicts.
        self._traces = {key: trace for key, trace in history.traces.items() if key.rule in plan.known}
        self._counts, self._levels = dict(history.counts), dict(history.levels)
        self._ports = set(history.ports)
        self._evicted_at_s = dict(history.evicted_at_s)
        self._marked = {trace.subject for trace in self._traces.values()}
        self._crowd = Crowd(gangs, self._other, whole)
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
        ok = Status.OK  # looked up once: this is the innermost of all loops
        now_s, heard, marked, counts, levels = self._now_s, self._heard, self._marked, self._counts, self._levels
        for reading in readings:
            listens = heard.get(reading.signal)
            if listens is None or now_s - reading.at_s > listens.fresh_s:
                continue
            value, subject = reading.value, reading.subject
            if value is not None and reading.status is ok:
                if (
                    listens.is_level
                    and listens.true[0] <= value <= listens.true[1]
                    and value not in SENTINELS
                    and (not listens.tells_more or self._has_level(reading, value))
                ):
                    levels[reading.signal, subject] = Level(reading.at_s, value)
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
                self._crowd.add(reading)
            else:
                held.add((reading.signal, subject))
            (events if reading.signal in EVENTS else waiting).append((reading, listens))
        # What happened explains what is seen, so it goes first.
        for reading, listens in chain(events, waiting):
            self._judge(reading, listens)

    def _has_level(self, reading: Reading, value: float) -> bool:
        """Take in what it tells beside its level; whether it is one at all."""
        if reading.signal is Signal.IB_PORT_STATE and value == 4:
            self._ports.add(reading.subject)
        if reading.signal is Signal.GPU_NVLINKS_DOWN and value == 0:
            links = self._levels.get((Signal.GPU_NVLINKS, reading.subject))
            if links is not None and links.value > 0:
                self._ports.add(_LINKS_OF + reading.node)
        return not (reading.signal is Signal.GPU_XID and value == 45)  # an echo is no news

    def _judge(self, reading: Reading, listens: Listening) -> None:
        if listens.among and reading.subject not in self._marked and self._crowd.is_calm(reading, listens.rules):
            return
        fresh = self._counted(reading, listens)
        if listens.rules:
            self._findings.extend(unreadable(reading, listens.rules))
        for rule in listens.rules:
            around = Around(
                other=lambda signal: self._other(signal, reading.subject),
                risen=lambda within_s: self._risen(reading, within_s) if fresh else None,
                peers=lambda rule=rule: self._crowd.peers_of(rule, reading),  # type: ignore[misc]
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
        self._counts[key], fresh = counted(self._counts.get(key), reading, value, listens.gap_s, listens.longest_s)
        return fresh

    def _risen(self, reading: Reading, within_s: float) -> float:
        return risen(self._counts[reading.signal, reading.subject], reading.at_s, within_s)

    # Go on from what is remembered

    def _advance(self, rule: Rule, reading: Reading, seen: Seen, around: Around) -> None:
        kind = ""
        if rule.same is not None:
            found = re.search(rule.same, reading.detail or "")
            kind = found[1] if found is not None else ""
        self._step(Key(rule.name, reading.subject, kind), rule, reading, seen, around)

    def _step(self, key: Key, rule: Rule, reading: Reading, seen: Seen, around: Around | None) -> None:
        before = self._traces.get(key)
        after = trace_after(
            before,
            key,
            rule,
            reading,
            seen,
            gap_s=gap_s(self._spec, reading.signal),
            rest_s=self._rest_s(rule, before),
            witnessed=not rule.witness or any(self._finds_bad(name, reading) for name in rule.witness),
            around=around,
        )
        if after is before:
            return
        self._findings.extend(changes(before, after, rule, reading))
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

    def _finds_bad(self, rule: str, reading: Reading) -> bool:
        trace = self._traces.get(Key(rule, reading.subject))
        return trace is not None and trace.standing is not None and trace.was_bad

    def _rest_s(self, rule: Rule, trace: Trace | None) -> float:
        """How long it must stay good: doubled for each time that it was taken out within a day before."""
        rest_s = rule.release_after_s or 0.0
        if rule.action is Action.WARN or trace is None or trace.standing is None:
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


__all__ = ["Finding", "History", "Judgement", "gap_s", "judge"]
