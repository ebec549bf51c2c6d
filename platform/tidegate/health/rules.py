"""The rules as a table: what a reading must be, how often, what follows, and how it ends.

A rule is one row of `rules_of`; `judge.py` runs them all the same way. The numbers of the temperature rules are the
operator's (`health.temperature` in policy.yaml); NVML's error codes mean the same everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from tidegate.arbiter.messages import Action, When
from tidegate.health.readings import Reading, Signal, Status
from tidegate.ids import Tier
from tidegate.spec.policy import HealthSpec, TemperatureRule


class Seen(Enum):
    """What one reading is to one rule."""

    BAD = "bad"
    BETWEEN = "between"
    """Not bad, and not good enough to lift a verdict either."""
    GOOD = "good"
    NOTHING = "nothing"
    """No evidence at all: missing, refused, implausible. It neither adds to a verdict nor lifts one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Above:
    """Bad above one number, good at or below a lower one; outside the plausible range it is no value at all."""

    bad_above: float
    good_at_or_below: float
    plausible_above: float
    plausible_up_to: float
    unit: str

    def seen(self, reading: Reading) -> Seen:
        value = plausible(reading, self.plausible_above, self.plausible_up_to)
        if value is None:
            return Seen.NOTHING
        if value > self.bad_above:
            return Seen.BAD
        return Seen.GOOD if value <= self.good_at_or_below else Seen.BETWEEN

    def evidence(self, reading: Reading) -> str:
        return f"{reading.value:g} {self.unit}, limit {self.bad_above:g} {self.unit}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Says:
    """Bad when the source gives one of these causes instead of a value, good when there is a value."""

    causes: frozenset[str]

    def seen(self, reading: Reading) -> Seen:
        if reading.status is Status.OK:
            return Seen.GOOD
        return Seen.BAD if reading.cause in self.causes else Seen.NOTHING

    def evidence(self, reading: Reading) -> str:
        return f"{reading.signal}: {reading.cause}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    name: str
    signal: Signal
    bad: Above | Says
    samples: int = 1
    """Bad readings that it takes, in a row unless `within_s` is given."""
    within_s: float | None = None
    """The bad readings need not be in a row, only this close together."""
    for_s: float = 0.0
    """And the row must be this long."""
    release_after_s: float | None
    """Good readings for this long lift the verdict; None = only a person or a reboot does."""
    action: Action
    when: When = When.NOW
    tier: Tier
    ends: str


DEADLINE_MISSED = "DEADLINE_MISSED"
"""The cause that the agent gives when a source has not come back in time; everything else is the source's own word."""

_PROBATION_S = 600.0
"""How long a fault that may come back must stay away; the temperature rule's own default."""
_LATCHED = "a person sets it healthy after a reset, or the machine reboots"


@lru_cache(maxsize=8)
def rules_of(spec: HealthSpec) -> tuple[Rule, ...]:
    """The table for one policy. Causes are NVML's return codes by name (`nvml.h`, `NVML_ERROR_…`)."""
    heat = spec.temperature
    cooled = f"at or below {heat.release_celsius:g} °C for"
    return (
        Rule(
            name="temperature",
            signal=Signal.GPU_TEMPERATURE,
            bad=_celsius_above(heat.limit_celsius, heat),
            samples=heat.samples,
            release_after_s=heat.release_after_s,
            action=Action.EVICT_GPU,
            # A hot GPU still computes right: it may serve, where one slow request is no stalled gang.
            tier=Tier.SERVE,
            ends=f"{cooled} {heat.release_after_s:g} s",
        ),
        Rule(
            name="temperature_warn",
            signal=Signal.GPU_TEMPERATURE,
            bad=_celsius_above(heat.warn_celsius, heat),
            for_s=60.0,
            release_after_s=60.0,
            action=Action.WARN,
            tier=Tier.GANG,
            ends=f"{cooled} 60 s",
        ),
        Rule(
            name="gpu_lost",
            signal=Signal.GPU_ANSWERS,
            bad=Says(causes=frozenset({"GPU_IS_LOST", "RESET_REQUIRED"})),
            samples=2,  # read again once: a reset of one GPU needs its whole NVLink group, so the node goes
            release_after_s=None,
            action=Action.EVICT_NODE,
            tier=Tier.NONE,
            ends=_LATCHED,
        ),
        Rule(
            name="gpu_unreachable",
            signal=Signal.GPU_ANSWERS,
            # UNKNOWN: in a container the device's cgroup may be gone; the source opens it again once before the second.
            bad=Says(causes=frozenset({"GPU_NOT_FOUND", "IRQ_ISSUE", "UNKNOWN"})),
            samples=2,
            release_after_s=_PROBATION_S,
            action=Action.EVICT_NODE,
            tier=Tier.NONE,
            ends=f"answers for {_PROBATION_S:g} s",
        ),
        Rule(
            name="gpu_timeout_warn",
            signal=Signal.GPU_ANSWERS,
            bad=Says(causes=frozenset({"TIMEOUT"})),
            release_after_s=60.0,
            action=Action.WARN,
            tier=Tier.GANG,
            ends="answers for 60 s",
        ),
        Rule(
            name="gpu_timeout",
            signal=Signal.GPU_ANSWERS,
            bad=Says(causes=frozenset({"TIMEOUT"})),
            samples=3,
            release_after_s=_PROBATION_S,
            action=Action.EVICT_NODE,
            tier=Tier.NONE,
            ends=f"answers for {_PROBATION_S:g} s",
        ),
        Rule(
            name="nvml_silent_warn",
            signal=Signal.NVML_ANSWERS,
            bad=Says(causes=frozenset({DEADLINE_MISSED})),
            release_after_s=60.0,
            action=Action.WARN,
            tier=Tier.GANG,
            ends="NVML answers in time for 60 s",
        ),
        Rule(
            name="nvml_silent",
            signal=Signal.NVML_ANSWERS,
            bad=Says(causes=frozenset({DEADLINE_MISSED})),
            samples=3,
            within_s=60.0,
            release_after_s=_PROBATION_S,
            action=Action.EVICT_NODE,
            tier=Tier.NONE,
            ends=f"NVML answers in time for {_PROBATION_S:g} s",
        ),
        Rule(
            name="driver_replaced",
            signal=Signal.NVML_ANSWERS,
            bad=Says(causes=frozenset({"LIB_RM_VERSION_MISMATCH"})),
            samples=2,
            release_after_s=0.0,
            action=Action.EVICT_NODE,
            tier=Tier.NONE,
            ends="NVML answers again: reboot, or reload the kernel module and restart the agent",
        ),
        Rule(
            name="nvml_absent",
            signal=Signal.NVML_ANSWERS,
            # A warning only: at boot the driver is not there yet, and a node without GPUs never has one.
            bad=Says(causes=frozenset({"DRIVER_NOT_LOADED", "LIBRARY_NOT_FOUND", "OTHER_LIBRARY"})),
            release_after_s=0.0,
            action=Action.WARN,
            tier=Tier.GANG,
            ends="NVML answers",
        ),
    )


def temperature_celsius(reading: Reading, rule: TemperatureRule) -> float | None:
    """The temperature if this is one that can be true; what people are shown and rules see is the same."""
    return plausible(reading, 0.0, rule.implausible_above_celsius)


def plausible(reading: Reading, above: float, up_to: float) -> float | None:
    """The value of a reading that has one inside (above, up_to]; NaN is outside."""
    if reading.status is not Status.OK or reading.value is None or not above < reading.value <= up_to:
        return None
    return reading.value


def _celsius_above(limit_celsius: float, heat: TemperatureRule) -> Above:
    return Above(
        bad_above=limit_celsius,
        good_at_or_below=heat.release_celsius,
        plausible_above=0.0,
        plausible_up_to=heat.implausible_above_celsius,
        unit="°C",
    )
