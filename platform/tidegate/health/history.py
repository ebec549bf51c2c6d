"""What is remembered between two looks. A value that goes into the judge and comes out anew, and lies in a file."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from pydantic import TypeAdapter

from tidegate.arbiter.messages import Verdict
from tidegate.health.readings import Signal
from tidegate.ids import NodeId

REPEAT_OFFENDER = "repeat_offender"
BURN_IN = "burn_in"
"""The rule under which a GPU or node that comes back waits for its burn-in (`returns.py`)."""


class Key(NamedTuple):
    rule: str
    subject: str
    kind: str = ""
    """What of an event's text must be the same, where the rule asks for that (`Rule.same`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What one rule remembers of one subject. A subject that gives no reason to remember has none."""

    rule: str
    subject: str
    node: NodeId
    kind: str = ""
    last_at_s: float
    """The newest reading that said anything."""
    bad_at_s: tuple[float, ...] = ()
    """The newest bad readings that count, at most as many as the rule takes."""
    bad_since_s: float | None = None
    """The first bad reading of the row that goes on."""
    good_since_s: float | None = None
    was_bad: bool = False
    """What that newest reading was."""
    standing: Verdict | None = None

    @property
    def key(self) -> Key:
        return Key(self.rule, self.subject, self.kind)


class Count(NamedTuple):
    """Of one counter of one subject."""

    at_s: float
    value: float
    risen: tuple[tuple[float, float], ...] = ()
    """When it rose within the longest window, and by how much."""


class Level(NamedTuple):
    """The newest value of a signal that other signals' rules look at."""

    at_s: float
    value: float


Subject = tuple[Signal, str]


@dataclass(frozen=True, slots=True)
class History:
    traces: Mapping[Key, Trace] = field(default_factory=dict)
    counts: Mapping[Subject, Count] = field(default_factory=dict)
    levels: Mapping[Subject, Level] = field(default_factory=dict)
    ports: frozenset[str] = frozenset()
    """Network ports that were once active, and nodes of which a GPU had all its NVLinks up."""
    evicted_at_s: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """By subject: when it was taken out; several rules that find the same fault are one time."""

    def to_json(self) -> bytes:
        return _STORED.dump_json(self.stored())

    @staticmethod
    def from_json(text: bytes) -> History:
        """
        Raises:
            pydantic.ValidationError: the text is no history.
        """
        return _STORED.validate_json(text).history()

    def stored(self) -> Stored:
        return Stored(
            traces=tuple(self.traces.values()),
            counts=tuple((*subject, count) for subject, count in self.counts.items()),
            levels=tuple((*subject, level) for subject, level in self.levels.items()),
            ports=self.ports,
            evicted_at_s=dict(self.evicted_at_s),
        )

    def without(self, subject: str) -> History:
        """A person says that this subject is healthy (a node: with all that is of it): nothing is held against it."""
        gone = {trace.subject for trace in self.traces.values() if subject in (trace.subject, trace.node)} | {subject}
        return replace(
            self,
            traces={key: trace for key, trace in self.traces.items() if trace.subject not in gone},
            counts={key: count._replace(risen=()) if key[1] in gone else count for key, count in self.counts.items()},
            evicted_at_s={key: times for key, times in self.evicted_at_s.items() if key not in gone},
        )

    def of(self, subjects: Collection[str], node: NodeId) -> History:
        """What is known of these GPUs, on a node that has another id now."""

        def moved(trace: Trace) -> Trace:
            standing = replace(trace.standing, node=node) if trace.standing is not None else None
            return replace(trace, node=node, standing=standing)

        return History(
            traces={key: moved(trace) for key, trace in self.traces.items() if trace.subject in subjects},
            counts={key: count for key, count in self.counts.items() if key[1] in subjects},
            levels={key: level for key, level in self.levels.items() if key[1] in subjects},
            evicted_at_s={subject: times for subject, times in self.evicted_at_s.items() if subject in subjects},
        )

    def with_older(self, other: History) -> History:
        """This, and what the other knows beside it."""
        return replace(
            self,
            traces={**other.traces, **self.traces},
            counts={**other.counts, **self.counts},
            levels={**other.levels, **self.levels},
            evicted_at_s={**other.evicted_at_s, **self.evicted_at_s},
        )

    def after_reboot(self) -> History:
        """A reboot lifts what is latched. It does not make a repeat offender a good one, nor forget how often."""
        kept = {key: trace for key, trace in self.traces.items() if trace.rule in (REPEAT_OFFENDER, BURN_IN)}
        return History(traces=kept, ports=self.ports, evicted_at_s=self.evicted_at_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A history as JSON has it: without keys that are pairs."""

    traces: tuple[Trace, ...] = ()
    counts: tuple[tuple[Signal, str, Count], ...] = ()
    levels: tuple[tuple[Signal, str, Level], ...] = ()
    ports: frozenset[str] = frozenset()
    evicted_at_s: dict[str, tuple[float, ...]] = field(default_factory=dict)

    def history(self) -> History:
        return History(
            traces={trace.key: trace for trace in self.traces},
            counts={(signal, subject): count for signal, subject, count in self.counts},
            levels={(signal, subject): level for signal, subject, level in self.levels},
            ports=self.ports,
            evicted_at_s=self.evicted_at_s,
        )


_STORED: TypeAdapter[Stored] = TypeAdapter(Stored)
