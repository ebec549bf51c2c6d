"""New weights: one replica tries them, then all serve them or none does."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from story import Story

from tidegate.arbiter.messages import ReplicaReport, Stage, Weights
from tidegate.arbiter.rollouts import SILENT_AFTER_S
from tidegate.errors import NothingToRollBackError

APP = "images"


@dataclass
class House:
    """Replicas that follow what they are told, but for versions that they find bad or die of."""

    story: Story = field(default_factory=Story)
    serving: dict[str, int] = field(default_factory=lambda: dict.fromkeys("abc", 0))
    bad: set[int] = field(default_factory=set)
    deadly: set[int] = field(default_factory=set)
    refused: dict[str, int] = field(default_factory=dict)

    def report(self, replica: str) -> Weights | None:
        return self.story.loop.report_replica(
            APP,
            ReplicaReport(
                replica=replica,
                at_s=self.story.loop.clock.now_s(),
                serving_version=self.serving[replica],
                refused="bad" if replica in self.refused else None,
                refused_version=self.refused.get(replica),
            ),
        )

    def round(self) -> None:
        for replica in list(self.serving):
            told = self.report(replica)
            if told is None or told.version == self.serving[replica]:
                continue
            if told.version in self.deadly:
                del self.serving[replica]
            elif told.version in self.bad:
                self.refused[replica] = told.version
            else:
                self.serving[replica] = told.version

    def newest(self) -> Weights:
        return self.story.loop.book.weights[APP]


def test_a_good_version_goes_to_one_and_then_to_all() -> None:
    house = House()
    house.story.loop.publish(APP, "/exports/1")
    house.round()
    assert house.serving == {"a": 1, "b": 0, "c": 0}
    house.round()
    house.round()
    assert house.serving == {"a": 1, "b": 1, "c": 1}
    assert house.newest().stage is Stage.OUT
    said = [entry.reason for entry in house.story.loop.journal.about(APP) if entry.kind == "roll"]
    assert said == ["weights version 1 go out: replica a serves them and made its pictures"]


def test_a_bad_version_reaches_nobody_and_the_next_good_one_everybody() -> None:
    """C193: the old one keeps serving; the one after a refused one knows what to come back to."""
    house = House(bad={2})
    house.story.loop.publish(APP, "/exports/1")
    for _ in range(3):
        house.round()
    house.story.loop.publish(APP, "/exports/2")
    for _ in range(3):
        house.round()
        assert set(house.serving.values()) == {1}
    assert (house.newest().stage, house.newest().reason) == (Stage.BACK, "replica a refused them: bad")
    assert house.refused == {"a": 2}
    after = house.story.loop.publish(APP, "/exports/3")
    assert (after.before_version, after.before_uri) == (1, "/exports/1")
    for _ in range(3):
        house.round()
    assert set(house.serving.values()) == {3}


def test_a_version_that_kills_replicas_is_taken_back() -> None:
    house = House(deadly={1})
    house.story.loop.publish(APP, "/exports/1")
    for _ in range(4):
        house.round()
        house.story.clock.advance(SILENT_AFTER_S + 1)
    assert house.newest().stage is Stage.BACK
    assert house.newest().reason == "replicas a, b were lost over them"
    assert house.serving == {"c": 0}


def test_a_person_takes_weights_back() -> None:
    house = House()
    for number in (1, 2):
        house.story.loop.publish(APP, f"/exports/{number}")
        for _ in range(3):
            house.round()
    assert house.story.loop.roll_back(APP) == Weights(version=1, uri="/exports/1")
    house.round()
    assert set(house.serving.values()) == {1}
    with pytest.raises(NothingToRollBackError):
        house.story.loop.roll_back(APP)
    with pytest.raises(NothingToRollBackError):
        house.story.loop.roll_back("another")


def test_the_first_weights_go_back_to_what_was_deployed() -> None:
    house = House()
    house.story.loop.publish(APP, "/exports/1")
    for _ in range(3):
        house.round()
    house.story.loop.roll_back(APP)
    house.round()
    assert set(house.serving.values()) == {0}


steps = st.lists(st.sampled_from(["a", "b", "c", "publish", "back"]), max_size=30)


@given(steps=steps, bad=st.sets(st.integers(1, 5)))
def test_a_bad_version_is_never_told_to_a_second_replica(steps: list[str], bad: set[int]) -> None:
    """Whatever comes in whatever order, also over a restart of the arbiter's book."""
    house = House(bad=bad)
    for step in steps:
        if step == "publish":
            house.story.loop.publish(APP, "/exports/x")
        elif step == "back":
            if APP in house.story.loop.book.weights and house.newest().stage is not Stage.BACK:
                house.story.loop.roll_back(APP)
        else:
            told = house.report(step)
            if told is not None and told.version != house.serving[step]:
                if told.version in bad:
                    house.refused[step] = told.version
                else:
                    house.serving[step] = told.version
        assert not set(house.serving.values()) & bad
    for version in bad:
        assert sum(refused == version for refused in house.refused.values()) <= 1
    assert house.story.loop.journal.book().weights == house.story.loop.book.weights
