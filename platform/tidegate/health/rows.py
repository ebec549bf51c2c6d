"""How a row of the table is written: what the rules of one kind of verdict have in common."""

from __future__ import annotations

from tidegate.arbiter.messages import Action
from tidegate.health.conditions import Condition
from tidegate.health.readings import Signal
from tidegate.health.rule import PROBATION_S, Rule
from tidegate.ids import Tier

OUR_OWN = "our own"
"""As the basis of a number that nobody has published."""


def warn(name: str, row: str, signal: Signal, bad: Condition, basis: str, **more: object) -> Rule:
    return _rule(name, row, signal, bad, Action.WARN, basis, {"release_after_s": 60.0, "tier": Tier.GANG, **more})


def gpu(name: str, row: str, signal: Signal, bad: Condition, basis: str, **more: object) -> Rule:
    return _rule(name, row, signal, bad, Action.EVICT_GPU, basis, {"tier": Tier.SERVE, **more})


def node(name: str, row: str, signal: Signal, bad: Condition, basis: str, **more: object) -> Rule:
    return _rule(name, row, signal, bad, Action.EVICT_NODE, basis, {"tier": Tier.NONE, **more})


def _rule(
    name: str, row: str, signal: Signal, bad: Condition, action: Action, basis: str, more: dict[str, object]
) -> Rule:
    given = {"release_after_s": PROBATION_S, **more}
    return Rule(name=name, row=row, signal=signal, bad=bad, action=action, basis=basis, **given)  # type: ignore[arg-type]
