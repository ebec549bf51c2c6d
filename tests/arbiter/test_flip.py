"""The flip as a story: what is decided, in which order, and what undoes it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from story import NODES, Story, ask, gpu

from tidegate.arbiter.claim import group_name
from tidegate.arbiter.drain import STOP_REPEAT_S
from tidegate.arbiter.messages import GangPhase, Spillway
from tidegate.arbiter.moves import Advance, CreateGroup, RemoveGroup, Route, SetTarget, StopReplicas
from tidegate.arbiter.states import ClaimState
from tidegate.arbiter.view import DOMAIN_LABEL
from tidegate.errors import ClaimNeverFitsError
from tidegate.ids import ClaimId, pool_name
from tidegate.spec.policy import Policy, ServingSpec
from tidegate.testing.fake_fleet import FakeFleet


@pytest.fixture
def story() -> Story:
    story = Story()
    story.tick(10)
    assert [pool.running for pool in story.fleet.pools.values()] == [2, 2, 2]
    return story


def train(story: Story, claim: ClaimId) -> None:
    """Let the gang make its first step."""
    story.until(claim, ClaimState.GRANTED)
    story.phases[claim] = GangPhase.RUNNING
    story.until(claim, ClaimState.RUNNING)


def test_free_gpus_serve(story: Story) -> None:
    assert story.loop.book.orders.spillway is Spillway.CLOSED
    assert set(story.loop.book.targets.values()) == {2}


def test_a_claim_takes_every_gpu_and_gives_it_back(story: Story) -> None:
    claim = story.file(ask())
    train(story, claim)
    assert story.loop.book.orders.spillway is Spillway.OPEN
    assert [pool.running for pool in story.fleet.pools.values()] == [0, 0, 0]
    grant = story.claim(claim).grant
    assert grant is not None
    assert {g for node in grant.nodes for g in node.gpus} == {gpu(node, i) for node in NODES for i in range(2)}
    story.phases[claim] = GangPhase.FINISHED
    story.until(claim, ClaimState.DONE)
    story.tick(3)
    assert story.loop.book.orders.spillway is Spillway.CLOSED
    assert [pool.running for pool in story.fleet.pools.values()] == [2, 2, 2]


def test_the_order_of_the_drain_is_group_then_routes_then_targets(story: Story) -> None:
    """A pending actor beats a pending group, so nothing may be pending when the group is made (ray.md B3)."""
    story.until(story.file(ask()), ClaimState.GRANTED)
    applied = story.fleet.applied
    group = next(i for i, move in enumerate(applied) if isinstance(move, CreateGroup))
    spill = next(i for i, m in enumerate(applied) if isinstance(m, Route) and m.spillway is Spillway.OPEN)
    down = [i for i, move in enumerate(applied) if isinstance(move, SetTarget) and move.replicas == 0]
    assert len(down) == 3
    assert group < min(down)
    assert spill < min(down)
    raised = [i for i, move in enumerate(applied) if isinstance(move, SetTarget) and move.replicas > 0]
    assert max(raised) < group


def test_replicas_stay_until_the_gateway_spills(story: Story) -> None:
    story.gateway_follows = False
    claim = story.file(ask())
    story.until(claim, ClaimState.DRAINING)
    story.tick(20)
    assert [pool.running for pool in story.fleet.pools.values()] == [2, 2, 2]
    story.gateway_follows = True
    story.until(claim, ClaimState.GRANTED)


def test_no_way_out_and_serving_keeps_its_gpus(story: Story) -> None:
    story.provider_works = False
    claim = story.file(ask())
    story.tick(50)
    assert story.claim(claim).state is ClaimState.PROVING
    assert "out: status 500" in story.claim(claim).reason
    assert [pool.running for pool in story.fleet.pools.values()] == [2, 2, 2]
    story.provider_works = True
    story.until(claim, ClaimState.GRANTED)


def test_no_way_out_for_ever_undoes_the_claim(story: Story) -> None:
    story.provider_works = False
    claim = story.file(ask())
    story.until(claim, ClaimState.UNDONE)
    assert story.loop.book.orders.spillway is Spillway.CLOSED


def test_without_protection_nothing_is_proven() -> None:
    story = Story(policy=Policy(serving=ServingSpec(protect=False)))
    story.tick(10)
    story.until(story.file(ask()), ClaimState.GRANTED)
    assert not story.reasons("probe")


def test_a_drain_that_never_ends_is_undone_and_serving_stays(story: Story) -> None:
    story.gateway_follows = False
    claim = story.file(ask())
    story.until(claim, ClaimState.UNDONE)
    assert "not ready within 60 s" in story.claim(claim).reason
    story.gateway_follows = True
    story.tick(20)
    assert story.fleet.groups == {}
    assert [pool.running for pool in story.fleet.pools.values()] == [2, 2, 2]
    assert story.loop.book.orders.spillway is Spillway.CLOSED


def test_what_is_in_flight_past_the_drains_deadline_is_cut_off(story: Story) -> None:
    """Its gateway has it answered by a provider."""
    story.fleet.stuck.add(NODES[0])
    claim = story.file(replace(ask(), drain_deadline_s=4.0))
    story.until(claim, ClaimState.DRAINING)
    story.until(claim, ClaimState.GRANTED)
    stop = next(move for move in story.journal.moves if isinstance(move, StopReplicas))
    assert stop.pools == (pool_name(NODES[0]),)
    lowered = min(m.at_s for m in story.journal.moves if isinstance(m, SetTarget) and m.claim == claim)
    assert 4.0 <= stop.at_s - lowered < 4.5


def test_serves_own_drain_deadline_is_the_longest(story: Story) -> None:
    story.fleet.stuck.add(NODES[0])
    claim = story.file(replace(ask(), drain_deadline_s=50.0))
    story.until(claim, ClaimState.GRANTED)
    stop = next(move for move in story.journal.moves if isinstance(move, StopReplicas))
    lowered = min(m.at_s for m in story.journal.moves if isinstance(m, SetTarget) and m.claim == claim)
    assert stop.at_s - lowered < story.policy.serving.drain_deadline_s + 0.5


def test_a_replica_that_nothing_stops_undoes_the_flip_and_the_spillway_closes_when_all_are_home(story: Story) -> None:
    story.fleet.frozen.add(NODES[0])
    claim = story.file(ask())
    story.until(claim, ClaimState.UNDONE)
    stops = [move.at_s for move in story.journal.moves if isinstance(move, StopReplicas)]
    assert len(stops) > 5, "it was not tried again"
    assert min(after - before for before, after in pairwise(stops)) >= STOP_REPEAT_S
    assert [pool.running for pool in story.fleet.pools.values()] == [2, 0, 0]
    story.tick(50)
    assert [pool.running for pool in story.fleet.pools.values()] == [2, 2, 2], "the others did not come home"
    assert story.loop.book.orders.spillway is Spillway.OPEN
    story.fleet.frozen.clear()
    for _ in range(100):
        if story.loop.book.orders.spillway is Spillway.CLOSED:
            break
        story.tick()
    assert [pool.running for pool in story.fleet.pools.values()] == [2, 2, 2]


def test_a_node_lost_while_draining_is_done_without(story: Story) -> None:
    story.gateway_follows = False
    claim = story.file(ask())
    story.until(claim, ClaimState.DRAINING)
    story.fleet.lose(NODES[2])
    story.tick()
    assert story.claim(claim).nodes == NODES[:2]
    assert "is gone" in story.claim(claim).reason
    story.gateway_follows = True
    story.train(claim)


def test_a_node_lost_while_draining_below_the_minimum_queues_the_claim(story: Story) -> None:
    story.gateway_follows = False
    claim = story.file(ask(gpus=6, at_least=5))
    story.until(claim, ClaimState.DRAINING)
    story.fleet.lose(NODES[2])
    story.tick()
    assert (story.claim(claim).state, story.claim(claim).nodes) == (ClaimState.QUEUED, ())
    story.gateway_follows = True
    story.tick(20)
    assert story.fleet.groups == {}
    assert [pool.running for pool in story.fleet.pools.values()] == [2, 2]
    story.fleet.join(NODES[2], 2)
    story.train(claim)


def test_replicas_come_home_in_steps(story: Story) -> None:
    claim = story.file(ask())
    train(story, claim)
    story.phases[claim] = GangPhase.FINISHED
    most_at_once, before = 0, 0
    for _ in range(100):
        story.tick()
        total = sum(pool.target for pool in story.fleet.pools.values())
        most_at_once, before = max(most_at_once, total - before), total
    assert most_at_once == 2
    assert before == 6


def test_a_step_home_waits_for_the_one_before_and_rests(story: Story) -> None:
    claim = story.file(ask())
    train(story, claim)
    story.phases[claim] = GangPhase.FINISHED
    raised_at_s: list[float] = []
    for _ in range(100):
        ready = sum(pool.running for pool in story.fleet.pools.values())
        before = sum(pool.target for pool in story.fleet.pools.values())
        story.tick()
        if sum(pool.target for pool in story.fleet.pools.values()) > before:
            assert ready == before, "replicas of the step before are not ready"
            raised_at_s.append(story.clock.now_s())
    assert len(raised_at_s) == 3
    rests_s = [after - before for before, after in pairwise(raised_at_s)]
    assert min(rests_s) >= story.policy.serving.return_dwell_s


def test_the_spillway_closes_last(story: Story) -> None:
    claim = story.file(ask())
    train(story, claim)
    story.phases[claim] = GangPhase.FINISHED
    for _ in range(200):
        story.tick()
        if story.loop.book.orders.spillway is Spillway.CLOSED:
            break
        assert sum(pool.running for pool in story.fleet.pools.values()) <= 6
    assert sum(pool.running for pool in story.fleet.pools.values()) == 6


def test_a_hot_gpu_leaves_the_gang_once_and_may_still_serve(story: Story) -> None:
    claim = story.file(ask())
    train(story, claim)
    story.hot.add(gpu(NODES[1], 1))
    story.tick(20)
    assert [(move.gpu, move.reason) for move in story.fleet.evicted] == [(gpu(NODES[1], 1), "79 °C")]
    assert story.claim(claim).state is ClaimState.RUNNING
    story.phases[claim] = GangPhase.FINISHED
    story.until(claim, ClaimState.DONE)
    assert story.fleet.pools[NODES[1]].running == 2


def test_a_hot_gpu_leaves_without_a_look_at_the_cluster(story: Story) -> None:
    """What Serve and GCS would answer changes nothing about it, and takes longer than all the rest of its way."""
    claim = story.file(ask())
    train(story, claim)
    seen = story.loop.seen
    story.hot.add(gpu(NODES[1], 1))
    story.tick(look=False)
    assert [move.gpu for move in story.fleet.evicted] == [gpu(NODES[1], 1)]
    assert story.loop.seen is seen


def test_before_the_first_look_nothing_is_decided_on_an_empty_cluster(story: Story) -> None:
    story.tick(look=False)
    assert set(story.loop.seen.nodes) == set(NODES)


def test_a_hot_gpu_is_not_granted(story: Story) -> None:
    story.hot.add(gpu(NODES[0], 0))
    story.tick(3)
    claim = story.file(ask())
    story.until(claim, ClaimState.GRANTED)
    grant = story.claim(claim).grant
    assert grant is not None
    assert gpu(NODES[0], 0) not in {g for node in grant.nodes for g in node.gpus}
    assert sum(len(node.gpus) for node in grant.nodes) == 5


def test_a_verdict_that_ends_lifts_the_quarantine(story: Story) -> None:
    story.hot.add(gpu(NODES[0], 0))
    story.tick(3)
    assert len(story.loop.book.quarantines) == 1
    story.hot.clear()
    story.tick(3)
    assert story.loop.book.quarantines == {}
    assert story.reasons("lift") == ["the agent lifted it: 70 °C or less for 600 s"]


def test_an_agent_that_is_silent_lifts_nothing(story: Story) -> None:
    """C149: no data is not an answer, in either direction."""
    story.hot.add(gpu(NODES[0], 0))
    story.tick(3)
    story.fleet.slots.pop(NODES[0])
    story.fleet.pools.pop(NODES[0])
    story.hot.clear()
    story.tick(10)
    assert len(story.loop.book.quarantines) == 1


def test_claims_queue_by_class_then_order_then_time(story: Story) -> None:
    first = story.file(ask("first"))
    train(story, first)
    low = story.file(ask("low", claim_class="scavenger"))
    late = story.file(ask("late", order=0))
    urgent = story.file(ask("urgent", order=5))
    story.tick(5)
    assert all(story.claim(c).state is ClaimState.QUEUED for c in (low, late, urgent))
    story.phases[first] = GangPhase.FINISHED
    story.until(urgent, ClaimState.GRANTED)
    assert story.claim(late).state is ClaimState.QUEUED
    assert story.claim(low).state is ClaimState.QUEUED
    assert "urgent" in story.claim(late).reason or "fewer than" in story.claim(late).reason


def test_a_scavenger_does_not_move_serving(story: Story) -> None:
    claim = story.file(ask(claim_class="scavenger"))
    story.tick(30)
    assert story.claim(claim).state is ClaimState.QUEUED
    assert [pool.running for pool in story.fleet.pools.values()] == [2, 2, 2]


def test_the_floor_is_never_taken() -> None:
    story = Story(policy=Policy(serving=ServingSpec(protect=False, floor_replicas=2)))
    story.tick(10)
    claim = story.file(ask(gpus=6, at_least=2))
    story.until(claim, ClaimState.GRANTED)
    assert sum(pool.running for pool in story.fleet.pools.values()) == 2
    assert len(story.claim(claim).nodes) == 2


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (ask(gpus=9, at_least=8), ("at least 8 GPUs", "6 GPUs on 3 live nodes", "lower min GPUs to 6")),
        (ask(claim_class="pretrian"), ("class 'pretrian'", "pretrain, scavenger")),
        (ask(gpus=2, at_least=4), ("4 to 2 GPUs", "at most max GPUs")),
        (
            replace(ask(gpus=4, at_least=4), gpus_per_node=4),
            ("4 GPUs on one node", "6 GPUs, at most 2 on one node", "lower GPUs per node to 2"),
        ),
        (
            replace(ask(gpus=4, at_least=4), gpus_per_node=1),
            ("at least 4 GPUs on nodes of one size, 1 on each", "3 GPUs on 3 live nodes", "lower min GPUs to 3"),
        ),
        (replace(ask(), patience_s=-1.0), ("patience_s -1.0", "must be above 0")),
    ],
)
def test_a_claim_that_can_never_fit_says_what_is_there(story: Story, spec: object, words: tuple[str, ...]) -> None:
    """C025: compare with the live cluster before anything waits."""
    with pytest.raises(ClaimNeverFitsError) as error:
        story.file(spec)  # type: ignore[arg-type]
    for word in words:
        assert word in str(error.value)


def test_one_domain_must_be_large_enough() -> None:
    slots = dict.fromkeys(NODES, 2)
    labels = {node: {DOMAIN_LABEL: name} for node, name in zip(NODES, "xxy", strict=True)}
    story = Story(fleet=FakeFleet(slots=slots, labels=labels))
    story.tick()
    with pytest.raises(ClaimNeverFitsError, match="4 GPUs on 3 live nodes in one network domain"):
        story.file(replace(ask(gpus=6, at_least=5), one_domain=True))
    story.until(story.file(replace(ask(gpus=6, at_least=4), one_domain=True)), ClaimState.GRANTED)


def test_filing_again_is_the_same_claim(story: Story) -> None:
    assert story.file(ask()) == story.file(ask())


def test_a_run_that_comes_again_while_its_old_claim_returns_gets_a_new_one(story: Story) -> None:
    old = story.file(ask())
    train(story, old)
    story.phases[old] = GangPhase.FINISHED
    story.until(old, ClaimState.RETURNING)
    new = story.file(ask())
    assert new != old
    story.until(new, ClaimState.GRANTED)
    story.until(old, ClaimState.DONE)


def test_a_released_claim_is_undone_before_and_returns_after(story: Story) -> None:
    story.provider_works = False
    early = story.file(ask("early"))
    story.tick(5)
    story.loop.release(early, "changed my mind")
    story.until(early, ClaimState.UNDONE)
    story.provider_works = True
    late = story.file(ask("late"))
    story.until(late, ClaimState.GRANTED)
    story.loop.release(late, "changed my mind again")
    story.until(late, ClaimState.DONE)
    assert story.fleet.groups == {}


def test_a_gang_whose_coordinator_died_gives_back_its_gpus(story: Story) -> None:
    claim = story.file(ask())
    train(story, claim)
    story.fleet.gangs_gone[claim] = "its coordinator is gone"
    story.until(claim, ClaimState.DONE)
    assert any("its coordinator is gone" in reason for reason in story.reasons("advance"))


def test_a_target_that_serve_lost_is_asserted_again(story: Story) -> None:
    """A redeploy resets a pool's target to the code's number (ray.md A2)."""
    story.fleet.pools[NODES[0]].target = 1
    story.tick(5)
    assert story.fleet.pools[NODES[0]].target == 2


def test_two_claims_share_the_cluster_when_both_fit(story: Story) -> None:
    one = story.file(ask("one", gpus=2, at_least=2))
    train(story, one)
    two = story.file(ask("two", gpus=4, at_least=4))
    story.until(two, ClaimState.GRANTED)
    assert not set(story.claim(one).nodes) & set(story.claim(two).nodes)


def test_every_reason_is_said_once(story: Story) -> None:
    story.provider_works = False
    claim = story.file(ask())
    story.tick(100)
    said = [m.reason for m in story.journal.moves if isinstance(m, Advance) and m.claim == claim]
    assert len(said) == len(set(said))


def test_evictions_and_groups_are_told_again_when_they_got_lost(story: Story) -> None:
    claim = story.file(ask())
    train(story, claim)
    story.gang(claim).obeys = False  # the order never arrives
    story.gang(claim).checkpoint_every_s = None
    story.hot.add(gpu(NODES[0], 0))
    story.tick(4)
    assert len(story.fleet.evicted) == 1
    story.tick(12)
    assert len(story.fleet.evicted) == 2, "told once, and again after two seconds"
    story.gang(claim).obeys = True
    story.phases[claim] = GangPhase.FINISHED
    story.until(claim, ClaimState.DONE)
    story.fleet.groups[group_name(story.claim(claim))] = story.claim(claim).nodes  # as if its removal had been lost
    story.tick(3)
    assert story.fleet.groups == {}
    assert any(isinstance(move, RemoveGroup) for move in story.fleet.applied)
