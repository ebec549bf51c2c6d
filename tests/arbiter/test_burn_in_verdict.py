"""The verdict under which agents hold what comes back: it keeps out what is out, and takes nothing else out."""

from __future__ import annotations

from dataclasses import replace

from story import NODES, Story, gpu, verdict

from tidegate.arbiter.messages import HealthReport
from tidegate.arbiter.quarantines import BURN_IN_RULE
from tidegate.health.history import BURN_IN

HOT = gpu(NODES[0], 0)


class Reporting(Story):
    """One GPU's verdict is under the test's hand."""

    waiting: bool = False

    def _health(self, node, slots, now_s) -> HealthReport:  # type: ignore[no-untyped-def]
        report = super()._health(node, slots, now_s)
        if node == NODES[0] and self.waiting:
            held = replace(verdict(node, HOT, now_s, lost=False), rule=BURN_IN_RULE, ends="a burn-in passes")
            return replace(report, verdicts=(*report.verdicts, held))
        return report


def rules(story: Story) -> set[str]:
    return {rule for _, gpu, rule in story.loop.book.quarantines if gpu == HOT}


def test_the_name_is_the_agents() -> None:
    assert BURN_IN_RULE == BURN_IN


def test_it_keeps_out_what_its_fault_no_longer_does_until_it_passes() -> None:
    story = Reporting()
    story.hot = {HOT}
    story.tick(3)
    assert rules(story) == {"temperature"}
    story.hot, story.waiting = set(), True
    story.tick(3)
    assert rules(story) == {BURN_IN_RULE}
    story.waiting = False
    story.tick(3)
    assert rules(story) == set()


def test_it_takes_nothing_out_that_was_not_out() -> None:
    story = Reporting()
    story.waiting = True
    story.tick(3)
    assert rules(story) == set()
    assert story.loop.book.held_back == {}
