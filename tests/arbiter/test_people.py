"""What a person may ask of the arbiter: a forecast, a quarantine, a pardon, a release."""

from __future__ import annotations

import pytest
from story import NODES, Story, ask, gpu

from tidegate.arbiter.messages import GangPhase
from tidegate.arbiter.moves import OPERATOR_RULE, Pardon
from tidegate.arbiter.states import ClaimState
from tidegate.arbiter.view import tier_of
from tidegate.errors import ClaimNeverFitsError, UnknownSubjectError
from tidegate.ids import ClaimId, Tier, pool_name


@pytest.fixture
def story() -> Story:
    story = Story()
    story.tick(10)
    return story


def train(story: Story, claim: ClaimId) -> None:
    story.until(claim, ClaimState.GRANTED)
    story.phases[claim] = GangPhase.RUNNING
    story.until(claim, ClaimState.RUNNING)


def test_a_forecast_says_what_would_happen_and_files_nothing(story: Story) -> None:
    before = story.loop.book
    found = story.loop.forecast(ask())
    assert (found.gpus, len(found.nodes), found.replicas_leaving) == (6, 3, 6)
    assert "proving the way out" in found.reason
    assert story.loop.book is before
    with pytest.raises(ClaimNeverFitsError):
        story.loop.forecast(ask(gpus=64, at_least=64))


def test_a_forecast_says_what_it_would_wait_for(story: Story) -> None:
    train(story, story.file(ask("first")))
    assert "fewer than 3 fit GPUs" in story.loop.forecast(ask("second")).reason
    story.file(ask("waits", order=1))
    found = story.loop.forecast(ask("third"))
    assert (found.nodes, found.reason) == ((), "third: queued: waits behind waits")
    assert "waits behind" not in story.loop.forecast(ask("urgent", order=9)).reason


def test_a_person_takes_a_gpu_out_and_only_a_person_gives_it_back(story: Story) -> None:
    claim = story.file(ask())
    train(story, claim)
    out = gpu(NODES[2], 0)
    story.loop.quarantine(out, Tier.NONE, "smells burnt")
    story.tick(5)
    assert [(move.gpu, move.reason) for move in story.fleet.evicted] == [(out, "smells burnt")]
    story.tick(50)  # the agent's reports, in which nothing stands, do not lift it
    assert [hold[2] for hold in story.loop.book.quarantines] == [OPERATOR_RULE]
    story.phases[claim] = GangPhase.FINISHED
    story.until(claim, ClaimState.DONE)
    assert story.fleet.pools[NODES[2]].running == 1, "a GPU of tier none serves"
    story.loop.pardon(out, "it was the toaster")
    story.tick(30)
    assert story.loop.book.quarantines == {}
    assert story.fleet.pools[NODES[2]].running == 2
    assert any(isinstance(move, Pardon) for move in story.fleet.applied), "the agent was not told"


def test_a_gpu_that_is_good_for_nothing_serves_nothing(story: Story) -> None:
    """No claim is there: its pool has one replica less until the GPU is well again."""
    story.loop.quarantine(gpu(NODES[2], 0), Tier.NONE, "smells burnt")
    story.tick(10)
    assert [story.fleet.pools[node].running for node in NODES] == [2, 2, 1]
    assert story.loop.book.orders.allowances[pool_name(NODES[2])] == 1
    assert "1 of its GPUs are good for serving" in story.reasons("set_target")
    story.loop.quarantine(gpu(NODES[1], 0), Tier.SERVE, "warm")
    story.tick(10)
    assert [story.fleet.pools[node].running for node in NODES] == [2, 2, 1], "warm ones may serve"
    story.loop.quarantine(NODES[0], Tier.NONE, "cable swap")
    story.tick(10)
    assert [story.fleet.pools[node].running for node in NODES] == [0, 2, 1]
    for subject in (gpu(NODES[2], 0), NODES[0]):
        story.loop.pardon(subject, "swapped")
    story.tick(20)
    assert [story.fleet.pools[node].running for node in NODES] == [2, 2, 2]


def test_a_person_takes_a_whole_node_out_by_its_name(story: Story) -> None:
    claim = story.file(ask())
    train(story, claim)
    story.loop.quarantine(NODES[1][:6], Tier.SERVE, "cable swap")
    story.tick(5)
    assert [(move.node, move.gpu) for move in story.fleet.evicted] == [(NODES[1], None)]


@pytest.mark.parametrize("subject", ["nonsense", "GPU-", "GPU-aaaa", ""])
def test_a_name_that_means_nothing_or_several_is_refused(story: Story, subject: str) -> None:
    with pytest.raises(UnknownSubjectError, match="known here"):
        story.loop.quarantine(subject, Tier.SERVE, "x")
    with pytest.raises(UnknownSubjectError, match="known here"):
        story.loop.release(ClaimId(subject or "none"), "x")


def test_two_rules_on_one_gpu_are_lifted_one_by_one(story: Story) -> None:
    on = gpu(NODES[0], 0)
    story.hot.add(on)
    story.lost.add(on)
    story.tick(5)
    assert {hold[2] for hold in story.loop.book.quarantines} == {"temperature", "gpu_lost"}
    assert tier_of(story.loop.book, NODES[0], on) is Tier.NONE
    story.lost.clear()
    story.tick(5)
    assert tier_of(story.loop.book, NODES[0], on) is Tier.SERVE
    story.hot.clear()
    story.tick(5)
    assert tier_of(story.loop.book, NODES[0], on) is Tier.GANG


def test_a_lost_gpu_takes_its_node_out_of_the_gang(story: Story) -> None:
    claim = story.file(ask())
    train(story, claim)
    story.hot.add(gpu(NODES[0], 1))
    story.lost.add(gpu(NODES[0], 1))
    story.tick(3)
    assert (NODES[0], None) in [(move.node, move.gpu) for move in story.fleet.evicted]
