"""Who listens to which signal, and which values mean nothing new to any of them. Worked out once for each policy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from tidegate.health.conditions import Above, Against, Below, Bits, OneOf, Replays, Rises, Says
from tidegate.health.history import BURN_IN, REPEAT_OFFENDER
from tidegate.health.peers import Among
from tidegate.health.readings import EVENTS, Signal
from tidegate.health.rule import Rule
from tidegate.health.rules import gap_s, rules_of
from tidegate.health.values import BOUNDS
from tidegate.spec.policy import HealthSpec

EVENT_FRESH_S = 60.0
"""Older ones are history: an agent that starts anew reads the kernel log from before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    rules: tuple[Rule, ...]
    cleans: Mapping[str, Rule]
    """Rules for events, which a value of this signal counts against."""
    low: float
    high: float
    """From here to there a value is good for all rules; empty (low above high) where no such range is known."""
    bits: int
    """And none of these bits may be set in it."""
    counts: bool
    counts_only: bool
    among: bool
    is_level: bool
    """Other signals' rules look at it."""
    true: tuple[float, float]
    """From here to there a value can be true."""
    tells_more: bool
    """Than its level: which ports and links are in use, and when something happened."""
    gap_s: float
    fresh_s: float
    longest_s: float
    """The longest window that it is counted over."""


@dataclass(frozen=True, slots=True)
class Plan:
    heard: Mapping[Signal, Listening]
    known: frozenset[str]
    """Names of all rules, also of those that no gang is known for."""


@lru_cache(maxsize=16)
def plan_of(spec: HealthSpec, in_gangs: bool) -> Plan:
    """Rules that compare GPUs of a gang are left out where no gang is known."""
    rules = [rule for rule in rules_of(spec) if in_gangs or not rule.gang]
    levels = _levels(rules)
    signals = {rule.signal for rule in rules} | levels
    heard = {signal: _listening(signal, rules, levels, spec) for signal in signals}
    return Plan(heard, frozenset(rule.name for rule in rules_of(spec)) | {REPEAT_OFFENDER, BURN_IN})


def _levels(rules: list[Rule]) -> frozenset[Signal]:
    levels = {
        Signal.IB_PORT_STATE,
        Signal.IB_PORT_ETHERNET,
        Signal.GPU_XID,
        Signal.GPU_NVLINKS,
        Signal.GPU_NVLINKS_DOWN,
    }
    for rule in rules:
        levels.update(guard.signal for guard in rule.while_)
        if isinstance(rule.bad, Against):
            levels.add(rule.bad.other)
        if isinstance(rule.bad, Replays):
            levels |= {Signal.GPU_PCIE_GENERATION_MAX, Signal.GPU_PCIE_WIDTH_MAX}
    return frozenset(levels)


def _listening(signal: Signal, rules: list[Rule], levels: frozenset[Signal], spec: HealthSpec) -> Listening:
    own = tuple(rule for rule in rules if rule.signal is signal)
    low, high = BOUNDS[signal]
    bits = 0
    for rule in own:
        match rule.bad:
            case Bits():
                bits |= int(rule.bad.mask)  # an enum's own `&` takes longer than all else that a reading meets
            case Above() | Below() | OneOf() | Says() | Against():
                calm = rule.bad.calm or (math.inf, -math.inf)
                low, high = max(low, calm[0]), min(high, calm[1])
            case _:
                low, high = math.inf, -math.inf
    counted = [rule.bad.within_s for rule in own if isinstance(rule.bad, Rises)]
    gap = gap_s(spec, signal)
    return Listening(
        rules=own,
        cleans={rule.name: rule for rule in rules if rule.clean is signal},
        low=low,
        high=high,
        bits=bits,
        counts=bool(counted),
        counts_only=bool(counted) and len(counted) == len(own),
        among=bool(own) and all(isinstance(rule.bad, Among) for rule in own),
        is_level=signal in levels,
        true=BOUNDS[signal],
        tells_more=signal in (Signal.IB_PORT_STATE, Signal.GPU_NVLINKS_DOWN, Signal.GPU_XID),
        gap_s=gap,
        fresh_s=max(gap, EVENT_FRESH_S) if signal in EVENTS else gap,
        longest_s=max(counted, default=0.0),
    )
