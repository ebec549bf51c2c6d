"""What one reading is to one rule: bad, good, or no evidence. Pure values, compared and printed like any other data."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from tidegate.health.evidence import Around, Seen, number_in
from tidegate.health.peers import Among
from tidegate.health.readings import ClockReason, Reading, Signal, Status
from tidegate.health.values import value_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Above:
    """Bad above one number, good at or below a lower one."""

    limit: float
    release: float | None = None
    """None = the limit itself."""
    plausible_up_to: float = math.inf
    """Nearer than the signal's own bound (`values.py`), if the operator says so."""
    unit: str = ""

    @property
    def calm(self) -> tuple[float, float]:
        return (-math.inf, self.limit if self.release is None else self.release)

    def seen(self, reading: Reading, around: Around) -> Seen:
        value = value_of(reading)
        if value is None or value > self.plausible_up_to:
            return Seen.NOTHING
        if value > self.limit:
            return Seen.BAD
        return Seen.GOOD if value <= self.calm[1] else Seen.BETWEEN

    def evidence(self, reading: Reading, around: Around) -> str:
        return f"{number_in(reading)} {self.unit}, limit {self.limit:g} {self.unit}".replace(" ,", ",").rstrip()

    def __str__(self) -> str:
        return f"> {self.limit:g} {self.unit}".rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Below:
    """Bad below one number, good at or above a higher one."""

    limit: float
    release: float | None = None
    unit: str = ""

    @property
    def calm(self) -> tuple[float, float]:
        return (self.limit if self.release is None else self.release, math.inf)

    def seen(self, reading: Reading, around: Around) -> Seen:
        value = value_of(reading)
        if value is None:
            return Seen.NOTHING
        if value < self.limit:
            return Seen.BAD
        return Seen.GOOD if value >= self.calm[0] else Seen.BETWEEN

    def evidence(self, reading: Reading, around: Around) -> str:
        return f"{number_in(reading)} {self.unit}, least {self.limit:g} {self.unit}".replace(" ,", ",").rstrip()

    def __str__(self) -> str:
        return f"< {self.limit:g} {self.unit}".rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Against:
    """Bad on the wrong side of another signal of the same subject, e.g. a link narrower than it can be."""

    other: Signal
    worse: str
    """`<`, `<=` or `>=`."""
    otherwise: float | None = None
    """Stands in for the other where there is none; None = then there is no evidence."""
    calm: tuple[float, float] | None = None
    """Values that are good whatever the other can be."""

    def seen(self, reading: Reading, around: Around) -> Seen:
        value, limit = value_of(reading), around.other(self.other)
        limit = self.otherwise if limit is None else limit
        if value is None or limit is None:
            return Seen.NOTHING
        bad = value < limit or (value == limit and self.worse == "<=") if self.worse != ">=" else value >= limit
        return Seen.BAD if bad else Seen.GOOD

    def evidence(self, reading: Reading, around: Around) -> str:
        limit = around.other(self.other)
        return f"{number_in(reading)} {self.worse} {self.otherwise if limit is None else limit:g} ({self.other})"

    def __str__(self) -> str:
        instead = f" (or {self.otherwise:g})" if self.otherwise is not None else ""
        return f"{self.worse} `{self.other}`{instead}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OneOf:
    """Bad when the value is one of these; good when it is one of the good (none given: any other)."""

    bad: frozenset[float]
    good: frozenset[float] | None = None
    what: Mapping[float, str] = field(default_factory=dict)

    @property
    def calm(self) -> tuple[float, float] | None:
        best = min(self.good) if self.good and len(self.good) == 1 else None
        return (best, best) if best is not None else None

    def seen(self, reading: Reading, around: Around) -> Seen:
        value = value_of(reading)
        if value is None:
            return Seen.NOTHING
        if value in self.bad:
            return Seen.BAD
        return Seen.GOOD if self.good is None or value in self.good else Seen.BETWEEN

    def evidence(self, reading: Reading, around: Around) -> str:
        said = self.what.get(reading.value if reading.value is not None else math.nan)
        named = f"{number_in(reading)} ({said})" if said else number_in(reading)
        return f"{reading.signal} {named}" + (f": {reading.detail}" if reading.detail else "")

    def __str__(self) -> str:
        return "is " + " or ".join(
            f"{value:g} ({self.what[value]})" if value in self.what else f"{value:g}" for value in sorted(self.bad)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bits:
    """Bad when one of these bits is set and none of the others."""

    mask: int
    without: int = 0
    shown: str = ""
    calm: tuple[float, float] | None = None

    def seen(self, reading: Reading, around: Around) -> Seen:
        value = value_of(reading)
        if value is None or value != int(value):
            return Seen.NOTHING
        mask = int(value)
        return Seen.BAD if mask & self.mask and not mask & self.without else Seen.GOOD

    def evidence(self, reading: Reading, around: Around) -> str:
        return f"{reading.signal} {int(reading.value or 0):#x}: {self._named()}"

    def __str__(self) -> str:
        without = f", without {self.without:#x}" if self.without else ""
        return f"bit {self.mask:#x} ({self._named()}){without}"

    def _named(self) -> str:
        return self.shown or (ClockReason(self.mask).name or "").lower().replace("_", " ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Says:
    """Bad when the source gives one of these causes (or statuses) instead of a value, good when there is a value."""

    causes: frozenset[str] = frozenset()
    statuses: frozenset[Status] = frozenset()
    calm: tuple[float, float] | None = (1.0, 1.0)

    def seen(self, reading: Reading, around: Around) -> Seen:
        if reading.status is Status.OK:
            return Seen.GOOD if value_of(reading) is not None else Seen.NOTHING
        bad = reading.cause in self.causes or reading.status in self.statuses
        return Seen.BAD if bad else Seen.NOTHING

    def evidence(self, reading: Reading, around: Around) -> str:
        return f"{reading.signal}: {reading.cause or reading.status}"

    def __str__(self) -> str:
        return "says " + " or ".join(sorted(self.causes | {str(status) for status in self.statuses}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rises:
    """Bad when a counter rose by more than this within the time; good when it stands still."""

    limit: float
    within_s: float
    calm: tuple[float, float] | None = None

    def seen(self, reading: Reading, around: Around) -> Seen:
        risen, limit = around.risen(self.within_s), self._limit(around)
        if value_of(reading) is None or risen is None or limit is None:
            return Seen.NOTHING
        if risen > limit:
            return Seen.BAD
        return Seen.GOOD if risen == 0 or risen <= limit / 2 else Seen.BETWEEN

    def evidence(self, reading: Reading, around: Around) -> str:
        risen, limit = around.risen(self.within_s) or 0, self._limit(around) or 0
        return f"{reading.signal} rose by {risen:g} within {self.within_s:g} s, limit {limit:g}"

    def _limit(self, around: Around) -> float | None:
        return self.limit

    def __str__(self) -> str:
        return f"rises by > {self.limit:g} in {self.within_s:g} s"


PCIE_REPLAYS_PER_LANE = (0.15, 0.3, 0.48, 0.96, 1.92, 3.84)
"""A minute, for generations 1 to 6 (`DcgmHealthWatch.cpp`): Gen4 x16 is 16, Gen5 x16 is 31."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replays(Rises):
    """A rise judged by what the PCIe link is: `limit` times DCGM's mark for its generation and width (C142)."""

    within_s: float = 60.0

    def _limit(self, around: Around) -> float | None:
        generation, lanes = around.other(Signal.GPU_PCIE_GENERATION_MAX), around.other(Signal.GPU_PCIE_WIDTH_MAX)
        if generation is None or lanes is None:
            return None
        per_lane = PCIE_REPLAYS_PER_LANE[min(int(generation), len(PCIE_REPLAYS_PER_LANE)) - 1]
        return self.limit * math.ceil(lanes * per_lane)

    def __str__(self) -> str:
        return f"rises by > {self.limit:g} × DCGM's mark for the link in {self.within_s:g} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Xid:
    """Bad on one of these XIDs (or on any that is not `other_than`), if the kernel's text fits."""

    codes: frozenset[int] = frozenset()
    other_than: frozenset[int] = frozenset()
    text: str | None = None
    """What the text must have; a regular expression."""
    no_text: bool = False
    """Only where the kernel's text is not known."""
    lifted_by: frozenset[int] = frozenset()
    calm: tuple[float, float] | None = None

    def seen(self, reading: Reading, around: Around) -> Seen:
        value = value_of(reading)
        if value is None or value != int(value):
            return Seen.NOTHING
        code = int(value)
        if code in self.lifted_by:
            return Seen.GOOD
        if not (code in self.codes or (self.other_than and code not in self.other_than)):
            return Seen.NOTHING
        if self.no_text:
            return Seen.NOTHING if reading.detail else Seen.BAD
        if self.text is not None and re.search(self.text, reading.detail or "") is None:
            return Seen.NOTHING
        return Seen.BAD

    def evidence(self, reading: Reading, around: Around) -> str:
        return f"XID {number_in(reading)}" + (f": {reading.detail}" if reading.detail else "")

    def __str__(self) -> str:
        codes = ", ".join(map(str, sorted(self.codes))) if self.codes else "any other"
        extra = f", text `{self.text}`" if self.text else ", no text known" if self.no_text else ""
        return f"XID {codes}{extra}"


Condition = Above | Below | Against | OneOf | Bits | Says | Rises | Among | Xid
