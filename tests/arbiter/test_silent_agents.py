"""Table 4.1, row 44: a node whose health agent is silent is not known to be well, and leaves its gang."""

from __future__ import annotations

import pytest
from story import NODES, Story, ask

from tidegate.arbiter.quarantines import SILENT_RULE
from tidegate.arbiter.states import ClaimState
from tidegate.ids import NodeId, Tier

LIMIT_S = 15.0
TICK_S = 0.2


@pytest.fixture
def story() -> Story:
    story = Story()
    story.tick(5)
    return story


def silent(story: Story) -> set[NodeId]:
    return {node for node, _, rule in story.loop.book.quarantines if rule == SILENT_RULE}


def test_a_silent_agent_is_a_verdict_on_its_node_just_past_the_limit_and_ends_with_its_next_word(story: Story) -> None:
    story.mute = {NODES[0]}
    story.tick(int(LIMIT_S / TICK_S) - 1)
    assert silent(story) == set()
    story.tick(3)
    assert silent(story) == {NODES[0]}
    [quarantine] = story.loop.book.quarantines.values()
    assert quarantine.verdict.tier is Tier.SERVE
    assert "silent" in quarantine.verdict.evidence
    story.mute = set()
    story.tick(2)
    assert silent(story) == set()


def test_its_ranks_leave_and_the_gang_goes_on_elsewhere(story: Story) -> None:
    claim = story.file(ask(gpus=4, at_least=2))
    story.train(claim)
    [gone, *_] = story.claim(claim).nodes
    story.mute = {gone}
    story.tick(int(LIMIT_S / TICK_S) + 3)
    assert any(move.node == gone and move.gpu is None for move in story.gang(claim).told)
    story.tick(50)
    assert gone not in story.claim(claim).nodes
    assert story.claim(claim).state is ClaimState.RUNNING


def test_when_nobody_is_heard_it_is_the_arbiter_that_is_deaf(story: Story) -> None:
    story.silent_agents = True
    story.tick(200)
    assert silent(story) == set()


def test_c190_a_clock_that_jumps_or_an_arbiter_that_stood_still_silences_nobody(story: Story) -> None:
    """Agents are timed by the arbiter's own clock, and not over a time in which it did not look itself."""
    story.clock.advance(60.0)
    story.mute = {NODES[1]}
    story.tick(2)
    assert silent(story) == set()
    story.clock.advance(-120.0)
    story.tick(2)
    assert silent(story) == set()
    story.tick(int(LIMIT_S / TICK_S) + 1)
    assert silent(story) == {NODES[1]}, "and counts from then on"


def test_the_verdict_outlives_the_arbiter_until_the_agent_speaks(story: Story) -> None:
    story.mute = {NODES[2]}
    story.tick(100)
    story.restart()
    story.tick(5)
    assert silent(story) == {NODES[2]}
    story.mute = set()
    story.tick(2)
    assert silent(story) == set()


def test_after_three_missed_beats_no_new_gang_stands_there_and_none_has_to_leave(story: Story) -> None:
    """Row 44: what is unknown evicts nobody, but it is no place to begin."""
    standing = story.file(ask("standing", gpus=2, at_least=2))
    story.train(standing)
    [on] = story.claim(standing).nodes
    away = next(node for node in NODES if node != on)
    story.mute = {on, away}
    story.tick(int(3.0 / TICK_S) + 2)
    claim = story.file(ask("new", gpus=4, at_least=2))
    story.until(claim, ClaimState.GRANTED)
    assert set(story.claim(claim).nodes) == set(NODES) - {on, away}
    assert story.claim(standing).state is ClaimState.RUNNING
    assert silent(story) == set()


def test_a_claim_that_only_the_unknown_could_serve_waits_for_their_next_word(story: Story) -> None:
    story.mute = {NODES[0]}
    story.tick(int(3.0 / TICK_S) + 2)
    claim = story.file(ask(gpus=6, at_least=6))
    story.tick(5)
    assert story.claim(claim).state is ClaimState.QUEUED
    story.mute = set()
    story.until(claim, ClaimState.GRANTED)


def test_two_missed_beats_are_nothing(story: Story) -> None:
    story.mute = {NODES[0]}
    story.tick(int(2.0 / TICK_S))
    claim = story.file(ask(gpus=6, at_least=6))
    story.until(claim, ClaimState.GRANTED)
    assert NODES[0] in story.claim(claim).nodes
