"""The rules of one policy: the whole table with what the operator changed in it."""

from __future__ import annotations

import difflib
from dataclasses import fields, replace
from functools import lru_cache

from tidegate.arbiter.messages import Action, When
from tidegate.errors import PolicyError
from tidegate.health.readings import Reading, Signal
from tidegate.health.rule import Rule
from tidegate.health.table import table
from tidegate.health.values import value_of
from tidegate.health.xids import xid_rules
from tidegate.spec.policy import HealthSpec, RuleOverride, TemperatureRule

_EVERY_S: dict[str, float] = {"second": 1.0, "five": 5.0, "minute": 60.0}
_SLOW = frozenset(
    {
        Signal.GPU_ECC_CORRECTED,
        Signal.GPU_ECC_UNCORRECTED,
        Signal.GPU_ROW_PENDING,
        Signal.GPU_ROW_FAILURE,
        Signal.GPU_ROWS_UNCORRECTABLE,
        Signal.GPU_SRAM_THRESHOLD,
        Signal.GPU_FABRIC_STATE,
        Signal.GPU_FABRIC_SUMMARY,
        Signal.GPU_FABRIC_MASK,
        Signal.GPU_PCIE_GENERATION,
        Signal.GPU_PCIE_GENERATION_MAX,
        Signal.GPU_PCIE_WIDTH,
        Signal.GPU_PCIE_WIDTH_MAX,
        Signal.GPU_MEMORY_LIMIT,
        Signal.GPU_SLOWDOWN_OFFSET,
        Signal.GPU_SLOWDOWN_LIMIT,
    }
)
"""Read once a minute: the driver takes long for them, and they change slowly."""
_EACH_LOOK = frozenset(
    {Signal.GPU_ANSWERS, Signal.GPU_TEMPERATURE, Signal.GPU_MARGIN, Signal.GPU_CLOCK_REASONS, Signal.NVML_ANSWERS}
)


def gap_s(spec: HealthSpec, signal: Signal = Signal.GPU_TEMPERATURE) -> float:
    """The longest rest between two readings that still follow each other: one look may be slow up to its deadline."""
    every_s = _EVERY_S["minute" if signal in _SLOW else "second" if signal in _EACH_LOOK else "five"]
    return spec.reading_deadline_s + 3 * max(spec.period_s, every_s)


@lru_cache(maxsize=8)
def rules_of(spec: HealthSpec) -> tuple[Rule, ...]:
    """The table for one policy. Causes are NVML's return codes by name (`nvml.h`, `NVML_ERROR_…`).

    Raises:
        PolicyError: `health.rules` names a rule that there is not, or changes what its rule does not have.
    """
    rules = {rule.name: rule for rule in (*table(spec), *xid_rules())}
    problems = []
    for name, change in spec.rules.items():
        if name not in rules:
            near = difflib.get_close_matches(name, rules, n=1, cutoff=0.5)
            hint = f"did you mean `{near[0]}`?" if near else "docs/health-rules.md lists them"
            problems.append(f"policy.yaml: health.rules.{name}: no such rule; {hint}")
            continue
        try:
            changed = _changed(rules[name], change)
        except ValueError as error:
            problems.append(f"policy.yaml: health.rules.{name}.{error}")
            continue
        if changed is None:
            del rules[name]
        else:
            rules[name] = changed
    if problems:
        raise PolicyError(tuple(problems))
    return tuple(rules.values())


def _changed(rule: Rule, change: RuleOverride) -> Rule | None:
    """The rule as the operator wants it; None where it is switched off."""
    if not change.enabled:
        return None
    wanted = change.model_dump(exclude_none=True, exclude={"enabled", "limit", "release", "action", "when"})
    new = replace(rule, **wanted)
    if change.action is not None:
        new = replace(new, action=Action(change.action))
    if change.when is not None:
        new = replace(new, when=When(change.when))
    numbers = {name: getattr(change, name) for name in ("limit", "release") if getattr(change, name) is not None}
    known = {field.name for field in fields(rule.bad)}
    for name in numbers:
        if name not in known:
            raise ValueError(f"{name}: this rule has none; it is bad when it {rule.bad}")
        if rule.name in ("temperature", "temperature_warn"):
            raise ValueError(f"{name}: set it in health.temperature, where the three limits are kept in order")
    if numbers:
        new = replace(new, bad=replace(rule.bad, **numbers))
    return new


def temperature_celsius(reading: Reading, rule: TemperatureRule) -> float | None:
    """The temperature if this is one that can be true; what people are shown and rules see is the same."""
    value = value_of(reading)
    return value if value is not None and value <= rule.implausible_above_celsius else None
