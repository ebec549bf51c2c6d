"""docs/health-rules.md is what the code says."""

from __future__ import annotations

from pathlib import Path

from tidegate.health.describe import page
from tidegate.health.rules import rules_of
from tidegate.spec.policy import HealthSpec

PAGE = Path(__file__).parents[2] / "docs" / "health-rules.md"


def test_the_page_is_up_to_date() -> None:
    wanted = page(HealthSpec(gpus_per_node=8, ib_port_gbits=400))
    assert PAGE.read_text(encoding="utf-8") == wanted, "run: python -m tidegate.health.describe > docs/health-rules.md"


def test_every_rule_of_every_policy_is_on_it() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert all(f"`{rule.name}`" in text for rule in rules_of(HealthSpec()))
