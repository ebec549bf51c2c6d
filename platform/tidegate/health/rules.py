"""The rules of one policy: the whole table with what the operator changed in it."""

from __future__ import annotations

import difflib
from dataclasses import fields, replace
from functools import lru_cache

from tidegate.arbiter.messages import Action, When
from tidegate.errors import PolicyError
from tidegate.health.readings import DCGM_S, PERIODS_S, Signal
from tidegate.health.rule import Rule
from tidegate.health.table import table
from tidegate.health.xids import xid_rules
from tidegate.spec.policy import HealthSpec, RuleOverride

_EXPORTERS_ONLY = frozenset({Signal.GPU_TENSOR_ACTIVE, Signal.GPU_SM_ACTIVE})
"""On Ampere and older only an exporter has these, at its own pace."""


def gap_s(spec: HealthSpec, signal: Signal = Signal.GPU_TEMPERATURE) -> float:
    """The longest rest between two readings that still follow each other: one look may be slow up to its deadline."""
    every_s = DCGM_S if signal in _EXPORTERS_ONLY else PERIODS_S.get(signal, 0.0)
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
