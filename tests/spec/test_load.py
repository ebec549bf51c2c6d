"""Wrong settings are refused by path, line and nearest right key (C185, C187, C188)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidegate.errors import PolicyError
from tidegate.spec.load import load_policy, parse_model
from tidegate.spec.policy import Policy

REPOSITORY = Path(__file__).parents[2]


def refused(text: str) -> str:
    with pytest.raises(PolicyError) as error:
        parse_model(text, Policy)
    return str(error.value)


def test_the_shipped_policy_is_valid() -> None:
    policy = load_policy(REPOSITORY / "policy.yaml")
    assert policy.serving.app == "images"
    assert policy.health.temperature.limit_celsius == 78


def test_an_empty_file_is_all_defaults() -> None:
    assert parse_model("", Policy) == Policy()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "serving:\n  app: a\n  protekt: true\n",
            "policy.yaml:3: serving.protekt: no such key; did you mean `protect`?",
        ),
        (
            "serving:\n  drain_deadline: 5\n",
            "policy.yaml:2: serving.drain_deadline: no such key; "
            "the unit stands in the name: `drain_deadline_s`, in seconds",
        ),
        ("claims: {deadline_ms: 300000}", "`deadline_s`, in seconds"),
        ("health: {temperature: {limit_f: 172}}", "`limit_celsius`, in °C"),
        ("serving:\n  patience_s: 10s\n", "policy.yaml:2: serving.patience_s: input should be a valid number"),
        ('serving: {protect: "yes please"}', "serving.protect: input should be a valid boolean, got 'yes please'"),
        ("serving: {protect: 1}", "serving.protect: input should be a valid boolean, got 1"),
        ("arbiter: {tick_s: 0}", "arbiter.tick_s: input should be greater than 0, got 0"),
        ("serving: {patience_s: 999999999}", "serving.patience_s: input should be less than or equal to 2592000"),
        ("providers:\n- name: a\n- name: b\n  base_url: x\n", "policy.yaml:2: providers[0].base_url: missing"),
        ("providers:\n- name: a\n  base_url: x\n  prices_usd: {512: 0.1}\n", "policy.yaml:4: providers[0].prices_usd"),
        ("providers:\n- name: a\n  base_url: x\n  sizes: [512]\n", "policy.yaml:4: providers[0].sizes"),
        ("providers:\n- name: a\n  base_url: x\n  sizes: [512by512]\n", "policy.yaml:4: providers[0].sizes"),
        ("providers:\n- name: a\n  base_url: x\n  fields: {speed: x}\n", "policy.yaml:4: providers[0].fields"),
        ("providers:\n- name: a\n  base_url: x\n  kind: fax\n", "policy.yaml:4: providers[0].kind"),
        (
            "providers:\n- {name: a, base_url: x}\n- {name: a, base_url: y}\n",
            "providers must have different names",
        ),
        ("health:\n  temperature: {limit_celsius: 60}\n", "release_celsius <= warn_celsius <= limit_celsius"),
        ("claims:\n  classes: [pretrain]\n", "policy.yaml:2: claims.classes"),
        ("serving: {app: a}\nserving: {app: b}\n", "policy.yaml:2: serving: given twice, first in line 1"),
        ("- a\n- b\n", "must be a mapping of settings"),
        ("serving: [", "policy.yaml:1: not YAML"),
    ],
)
def test_what_is_refused_and_how(text: str, words: str) -> None:
    if words == "policy.yaml:2: claims.classes":
        assert "must name `serving`" in refused(text)
    else:
        assert words in refused(text)


def test_every_problem_is_named_at_once() -> None:
    said = refused("serving: {protekt: true}\narbiter: {tick: 1}\n").splitlines()
    assert len(said) == 2


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="cannot be read: No such file"):
        load_policy(tmp_path / "none.yaml")
