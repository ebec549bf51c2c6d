"""A held gang whose nodes are lost, drain, are evicted, cool down or come: it keeps the rest and goes on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from story import NODES, WITH_PROVIDER, Story, ask, gpu

from tidegate.arbiter.claim import group_name
from tidegate.arbiter.messages import GangPhase, GangReport
from tidegate.arbiter.placement import DOMAIN_LABEL
from tidegate.arbiter.states import ClaimState
from tidegate.ids import ClaimId, Generation, NodeId, Tier, pool_name
from tidegate.spec.policy import PurseSpec
from tidegate.testing.fake_fleet import FakeFleet

A, B, C, D, E = (NodeId(letter * 56) for letter in "abcde")


def fleet(*nodes: NodeId, serves: bool = True) -> FakeFleet:
    return FakeFleet(slots=dict.fromkeys(nodes, 2), serves=serves)


def running(story: Story, gpus: int = 4, at_least: int = 2) -> ClaimId:
    """A gang that stands on A, B, … and no replica is in its way any more."""
    story.tick(10)
    claim = story.file(ask(gpus=gpus, at_least=at_least))
    story.train(claim)
    return claim


@pytest.fixture
def spare() -> Story:
    """Four nodes that serve: two go to the gang."""
    return Story(fleet=fleet(A, B, C, D))


def granted(story: Story, claim: ClaimId) -> dict[NodeId, int]:
    grant = story.claim(claim).grant
    assert grant is not None
    assert grant.placement_group == group_name(story.claim(claim))
    return {node.node: len(node.gpus) for node in grant.nodes}


def test_a_lost_node_is_replaced_and_the_others_stay(spare: Story) -> None:
    """C027, C036: the group that Ray would leave rescheduling for ever is replaced by one that can be."""
    claim = running(spare)
    first = spare.claim(claim).grant
    assert (first is not None, spare.claim(claim).nodes) == (True, (A, B))
    spare.fleet.lose(B)
    spare.tick()
    assert spare.claim(claim).state is ClaimState.DRAINING
    assert spare.claim(claim).grant is None
    assert (spare.claim(claim).attempt, spare.claim(claim).nodes) == (2, (A, C))
    spare.until(claim, ClaimState.RUNNING)
    again = spare.claim(claim).grant
    assert first is not None
    assert again is not None
    assert again.generation > first.generation
    assert again.placement_group != first.placement_group
    assert list(spare.fleet.groups) == [again.placement_group], "an old group is left"
    assert spare.fleet.pools[D].running == 2, "one node was needed, one was taken"


def test_without_a_spare_it_goes_on_smaller() -> None:
    story = Story(fleet=fleet(A, B))
    claim = running(story)
    story.fleet.lose(B)
    story.until(claim, ClaimState.DRAINING)
    story.until(claim, ClaimState.RUNNING)
    assert granted(story, claim) == {A: 2}


def test_without_its_minimum_it_queues_and_goes_on_when_there_is_room_again() -> None:
    story = Story(fleet=fleet(A, B))
    claim = running(story, at_least=4)
    filed_at_s, step = story.claim(claim).filed_at_s, story.gang(claim).step
    story.fleet.lose(B)
    story.until(claim, ClaimState.QUEUED)
    assert "can't be had now" in story.claim(claim).reason
    story.tick(20)
    assert story.claim(claim).grant is None
    assert story.fleet.pools[A].running == 2, "what it can't use serves meanwhile"
    story.fleet.join(C, 2)
    story.until(claim, ClaimState.RUNNING)
    assert story.claim(claim).filed_at_s == filed_at_s
    assert story.gang(claim).step > step


def test_a_claim_that_ran_waits_for_ever_rather_than_be_undone() -> None:
    story = Story(fleet=fleet(A, B))
    claim = running(story, at_least=4)
    story.fleet.lose(B)
    story.tick(5 * 200)
    assert story.claim(claim).state is ClaimState.QUEUED


def test_serving_is_not_moved_for_a_lost_node_while_no_provider_works(spare: Story) -> None:
    claim = running(spare)
    spare.provider_works = False
    spare.fleet.lose(B)
    spare.until(claim, ClaimState.DRAINING)
    spare.until(claim, ClaimState.RUNNING)
    assert granted(spare, claim) == {A: 2}
    spare.provider_works = True
    spare.tick(100)
    assert granted(spare, claim) == {A: 2, C: 2}, "it did not grow back when a provider worked again"


def test_two_claims_never_hold_part_of_each_other_after_losses() -> None:
    """C028: both need two nodes, three are left: one goes on, the other holds nothing."""
    story = Story(fleet=fleet(A, B, C, D, serves=False))
    one = story.file(ask("one", gpus=4, at_least=4))
    story.train(one)
    two = story.file(ask("two", gpus=4, at_least=4))
    story.train(two)
    story.fleet.lose(B)
    story.fleet.lose(D)
    story.tick(30)
    assert sorted(str(story.claim(claim).state) for claim in (one, two)) == ["granted", "queued"] or sorted(
        str(story.claim(claim).state) for claim in (one, two)
    ) == ["queued", "running"]
    assert [len(story.claim(claim).held) for claim in (one, two)] in ([2, 0], [0, 2])


def test_a_group_that_breaks_without_a_node_is_made_again(spare: Story) -> None:
    claim = running(spare)
    spare.fleet.ready.clear()
    spare.fleet.groups.clear()
    spare.until(claim, ClaimState.DRAINING)
    spare.until(claim, ClaimState.RUNNING)
    assert granted(spare, claim) == {A: 2, B: 2}


def test_an_evicted_node_is_swapped_after_the_next_checkpoint_and_the_gang_runs_on_until_then(spare: Story) -> None:
    claim = running(spare)
    gang = spare.gang(claim)
    gang.checkpoint_every_s = None
    spare.lost.add(gpu(B, 0))
    spare.tick(30)
    assert [(move.node, move.gpu) for move in gang.told] == [(B, None)]
    assert spare.claim(claim).state is ClaimState.RUNNING
    assert spare.claim(claim).joining == (C,)
    assert spare.claim(claim).freed_at_s is not None
    assert spare.fleet.pools[C].running == 0
    assert spare.fleet.pools[D].running == 2
    gang.checkpoint_every_s = 1.0
    spare.until(claim, ClaimState.DRAINING)
    spare.until(claim, ClaimState.RUNNING)
    assert granted(spare, claim) == {A: 2, C: 2}
    spare.tick(30)
    assert spare.fleet.pools[B].running == 1, "what is left of the node serves"


def test_an_evicted_node_without_a_spare_is_given_up_after_the_next_checkpoint() -> None:
    story = Story(fleet=fleet(A, B))
    claim = running(story)
    story.loop.quarantine(B[:6], Tier.SERVE, "cable swap")
    story.until(claim, ClaimState.DRAINING)
    story.until(claim, ClaimState.RUNNING)
    assert granted(story, claim) == {A: 2}
    story.tick(30)
    assert story.fleet.pools[B].running == 2


def test_an_evicted_node_below_the_minimum_is_replaced_at_once(spare: Story) -> None:
    claim = running(spare, at_least=4)
    spare.gang(claim).checkpoint_every_s = None
    spare.lost.add(gpu(B, 0))
    spare.until(claim, ClaimState.DRAINING)
    assert "2 fit GPUs are left, it needs 4" in spare.claim(claim).reason
    spare.until(claim, ClaimState.RUNNING)
    assert granted(spare, claim) == {A: 2, C: 2}


def test_a_draining_node_is_saved_from_and_swapped_before_it_goes(spare: Story) -> None:
    """C038: the gang is told by when; it loses nothing that it could save."""
    claim = running(spare)
    gang = spare.gang(claim)
    gang.checkpoint_every_s = None
    gone_at_s = spare.clock.now_s() + 30.0
    spare.fleet.drains[B] = gone_at_s
    spare.tick(3)
    assert [(move.node, move.save_by_s) for move in gang.told] == [(B, gone_at_s)]
    assert "Ray drains the node: it goes in 30 s" in gang.told[0].reason
    spare.tick(20)
    assert spare.claim(claim).state is ClaimState.RUNNING
    gang.committed_at_s = spare.clock.now_s()  # as a gang does that was told to save
    spare.until(claim, ClaimState.DRAINING)
    assert spare.clock.now_s() < gone_at_s
    spare.until(claim, ClaimState.RUNNING)
    assert granted(spare, claim) == {A: 2, C: 2}


def test_a_node_with_a_verdict_against_the_whole_is_no_place_for_a_gang_though_a_gpu_of_it_is_well() -> None:
    story = Story(fleet=fleet(A, B))
    story.lost.add(gpu(A, 0))
    story.tick(10)
    claim = story.file(ask(gpus=4, at_least=2))
    story.train(claim)
    assert granted(story, claim) == {B: 2}
    assert story.claim(claim).attempt == 1, "it was placed there first"
    assert story.fleet.pools[A].running == 1


def test_a_node_that_drains_is_no_place_for_a_gang() -> None:
    story = Story(fleet=fleet(A, B))
    story.fleet.drains[A] = story.clock.now_s() + 60.0
    story.tick(10)
    claim = story.file(ask(gpus=4, at_least=2))
    story.train(claim)
    assert granted(story, claim) == {B: 2}


def test_a_drain_that_nothing_can_replace_sends_the_gang_to_the_queue_in_time() -> None:
    story = Story(fleet=fleet(A, B))
    claim = running(story, at_least=4)
    story.gang(claim).obeys = False
    gone_at_s = story.clock.now_s() + 20.0
    story.fleet.drains[B] = gone_at_s
    story.until(claim, ClaimState.PREEMPTED)
    assert story.claim(claim).leave_by_s == gone_at_s
    story.until(claim, ClaimState.QUEUED)
    assert story.clock.now_s() <= gone_at_s + 0.3


def test_a_cooled_gpu_comes_back_at_the_next_checkpoint_under_the_same_group() -> None:
    story = Story(fleet=fleet(A, B))
    claim = running(story)
    first = story.claim(claim).grant
    assert first is not None
    story.hot.add(gpu(B, 1))
    story.tick(10)
    less = story.claim(claim).grant
    assert less is not None
    assert (less.placement_group, granted(story, claim)) == (first.placement_group, {A: 2, B: 1})
    story.hot.clear()
    story.tick(10)
    more = story.claim(claim).grant
    assert more is not None
    assert more.generation > less.generation > first.generation
    assert more.placement_group == first.placement_group
    assert granted(story, claim) == {A: 2, B: 2}
    story.tick(10)
    assert len(story.gang(claim).report(story.clock.now_s()).gpus) == 4
    assert story.claim(claim).state is ClaimState.RUNNING, "it did not have to form again"


def test_an_arbiter_that_has_just_come_back_waits_for_the_names_of_the_gpus() -> None:
    """Its first look shows nodes, but no agent has said yet which GPUs they have."""
    story = Story(fleet=fleet(A, B))
    claim = running(story)
    story.hot.add(gpu(B, 1))
    story.tick(10)
    before = story.claim(claim).grant
    waiting = story.file(ask("waiting", gpus=4, at_least=3))
    story.restart()
    story.silent_agents = True
    story.tick(10)
    assert story.claim(claim).grant == before, "it gave GPUs whose names it does not know"
    story.silent_agents = False
    story.tick(10)
    assert story.claim(claim).grant == before
    story.loop.release(claim, "enough")
    story.until(waiting, ClaimState.DRAINING, 1000)
    story.restart()
    story.silent_agents = True
    story.tick(10)
    assert story.claim(waiting).state is ClaimState.DRAINING
    story.silent_agents = False
    story.until(waiting, ClaimState.GRANTED)
    grant = story.claim(waiting).grant
    assert grant is not None
    assert all(g.startswith("GPU-") for node in grant.nodes for g in node.gpus)


def test_a_hot_gpu_gives_no_reason_to_take_another_node(spare: Story) -> None:
    claim = running(spare)
    spare.hot.add(gpu(B, 1))
    spare.tick(50)
    assert (spare.claim(claim).nodes, spare.claim(claim).joining) == ((A, B), ())
    assert spare.fleet.pools[C].running == 2


def test_too_few_gpus_are_made_up_for_at_once(spare: Story) -> None:
    claim = running(spare, at_least=4)
    spare.hot.add(gpu(B, 1))
    spare.until(claim, ClaimState.DRAINING)
    spare.until(claim, ClaimState.RUNNING)
    assert granted(spare, claim) == {A: 2, B: 1, C: 2}


def with_a_node_to_join() -> tuple[Story, ClaimId]:
    """A gang that has lost one of its two nodes, takes no checkpoint for now, and could have C."""
    story = Story(fleet=fleet(A, B))
    claim = running(story)
    story.fleet.lose(B)
    story.until(claim, ClaimState.DRAINING)
    story.until(claim, ClaimState.RUNNING)
    story.gang(claim).checkpoint_every_s = None
    story.fleet.join(C, 2)
    story.tick(30)
    return story, claim


def test_a_node_that_comes_back_is_freed_first_and_joins_after_a_checkpoint() -> None:
    story, claim = with_a_node_to_join()
    assert story.claim(claim).joining == (C,)
    assert story.claim(claim).state is ClaimState.RUNNING
    assert story.fleet.pools[C].running == 0
    story.gang(claim).checkpoint_every_s = 1.0
    story.until(claim, ClaimState.DRAINING)
    story.until(claim, ClaimState.RUNNING)
    assert granted(story, claim) == {A: 2, C: 2}


def test_nobody_grows_while_an_equal_waits_and_what_was_joining_goes_back() -> None:
    story, claim = with_a_node_to_join()
    assert story.claim(claim).joining == (C,)
    waits = story.file(ask("waits", gpus=2, at_least=2))
    story.until(waits, ClaimState.GRANTED)
    assert story.claim(claim).joining == ()
    assert story.claim(waits).nodes == (C,)


def test_a_joining_node_that_dies_is_forgotten() -> None:
    story, claim = with_a_node_to_join()
    story.fleet.lose(C)
    story.tick(3)
    assert (story.claim(claim).joining, story.claim(claim).state) == ((), ClaimState.RUNNING)


def test_growing_leaves_serving_its_floor() -> None:
    policy = WITH_PROVIDER.model_copy(
        update={"serving": WITH_PROVIDER.serving.model_copy(update={"floor_replicas": 2})}
    )
    story = Story(policy=policy, fleet=fleet(A, B, C))
    claim = running(story, gpus=6, at_least=2)
    assert len(story.claim(claim).nodes) == 2
    story.tick(50)
    assert len(story.claim(claim).held) == 2
    story.fleet.join(D, 2)
    story.tick(50)
    assert len(story.claim(claim).nodes) == 3
    assert sum(pool.running for pool in story.fleet.pools.values()) == 2


@pytest.mark.parametrize(
    ("whole", "at_least", "ends"),
    [(True, 4, {B: 2, C: 2}), (True, 2, {B: 2, C: 2}), (False, 4, {A: 1, B: 2, C: 2}), (False, 2, {A: 1, B: 2})],
)
def test_a_gpu_that_goes_bad_while_the_claim_drains_is_not_granted(
    spare: Story, whole: bool, at_least: int, ends: dict[NodeId, int]
) -> None:
    spare.gateway_follows = False
    spare.tick(10)
    claim = spare.file(ask(gpus=4, at_least=at_least))
    spare.until(claim, ClaimState.DRAINING)
    (spare.lost if whole else spare.hot).add(gpu(A, 0))
    spare.gateway_follows = True
    spare.train(claim)
    assert granted(spare, claim) == ends
    gives = [move.grant for move in spare.journal.moves if move.kind == "give"]
    assert [{n.node: len(n.gpus) for n in grant.nodes} for grant in gives] == [ends], "another grant was given before"


def test_over_budget_no_busy_gpu_is_taken_for_a_lost_node() -> None:
    story = Story(
        policy=WITH_PROVIDER.model_copy(update={"purse": PurseSpec(per_hour_usd=1.0)}), fleet=fleet(A, B, C, D)
    )
    claim = running(story)
    story.gateway_says["spent_usd_total"] = 2.0
    story.fleet.lose(B)
    story.until(claim, ClaimState.DRAINING)
    story.until(claim, ClaimState.RUNNING)
    assert granted(story, claim) == {A: 2}


def test_a_shape_takes_so_many_gpus_of_each_node_and_one_domain() -> None:
    slots = {A: 4, B: 4, C: 4, D: 4, E: 4}
    labels = {node: {DOMAIN_LABEL: name} for node, name in zip(slots, "xyxyx", strict=True)}
    story = Story(fleet=FakeFleet(slots=slots, labels=labels, serves=False))
    spec = ask(gpus=9, at_least=9)
    claim = story.file(replace(spec, gpus_per_node=3, one_domain=True))
    story.train(claim)
    assert granted(story, claim) == {A: 3, C: 3, E: 3}
    story.hot.add(gpu(C, 1))
    story.tick(5)
    assert granted(story, claim) == {A: 3, C: 3, E: 3}, "the node's fourth GPU takes the hot one's place"
    story.fleet.lose(E)
    story.until(claim, ClaimState.QUEUED)


def test_a_gang_that_reports_from_before_it_formed_again_is_not_running(spare: Story) -> None:
    claim = running(spare)
    spare.fleet.lose(B)
    spare.phases.pop(claim)
    spare.until(claim, ClaimState.GRANTED)
    old = spare.gang(claim).report(spare.clock.now_s())
    assert (old.phase, old.grant_generation is not None) == (GangPhase.RUNNING, True)
    spare.loop.report_gang(old)
    spare.tick(3)
    assert spare.claim(claim).state is ClaimState.GRANTED


def test_a_report_for_a_claim_that_nobody_knows_is_told_to_leave(spare: Story) -> None:
    report = GangReport(
        claim=ClaimId("ghost"), at_s=0.0, phase=GangPhase.RUNNING, gang_generation=Generation(3), step=1, world_size=2
    )
    orders = spare.loop.report_gang(report)
    assert (orders.grant, orders.leave) == (None, "there is no claim ghost")


def test_orders_of_a_claim_in_each_of_its_states(spare: Story) -> None:
    claim = running(spare)
    report = spare.gang(claim).report(spare.clock.now_s())
    assert spare.loop.report_gang(report).grant == spare.claim(claim).grant
    spare.loop.release(claim, "enough")
    spare.until(claim, ClaimState.RETURNING)
    orders = spare.loop.report_gang(report)
    assert (orders.grant, orders.leave) == (None, "the claim is returning: enough")
    spare.until(claim, ClaimState.DONE)
    assert spare.loop.report_gang(report).leave == "the claim is done: its GPUs serve again"


def test_a_group_of_ours_that_no_claim_stands_on_is_removed(spare: Story) -> None:
    """C013: nothing that was never placed lies about. A crash may lose the act after the journal."""
    spare.fleet.groups["tidegate-forgotten-7"] = (A,)
    spare.tick(2)
    assert spare.fleet.groups == {}


def test_a_release_survives_the_arbiters_crash() -> None:
    story = Story()
    claim = story.file(ask())
    story.loop.release(claim, "changed my mind")
    story.restart()
    story.until(claim, ClaimState.UNDONE)
    assert story.claim(claim).reason == "released: changed my mind"


def test_gpus_whose_memory_nobody_owns_to_are_not_handed_over() -> None:
    """C033: used 2338 MiB, compute process list empty."""
    story = Story()
    story.tick(10)
    story.memory[gpu(A, 1)] = (2338 * 2**20, 0)
    claim = story.file(ask())
    story.until(claim, ClaimState.DRAINING)
    story.tick(30)
    assert story.claim(claim).state is ClaimState.DRAINING
    assert story.claim(claim).reason == f"memory is taken and no process is listed: 2338 MiB on {gpu(A, 1)}"
    story.until(claim, ClaimState.UNDONE)
    assert "2338 MiB" in story.claim(claim).reason


@pytest.mark.parametrize("said", [(2338 * 2**20, 1), (500 * 2**20, 0), (None, 0), (2338 * 2**20, None)])
def test_memory_of_a_process_or_that_nobody_can_read_is_no_obstacle(
    said: tuple[int | None, int | None],
) -> None:
    story = Story()
    story.tick(10)
    story.memory[gpu(A, 1)] = said
    story.until(story.file(ask()), ClaimState.GRANTED)


def test_a_return_that_never_ends_ends() -> None:
    story = Story()
    story.tick(10)
    claim = story.file(replace(ask(), deadline_s=500.0))
    story.train(claim)
    story.phases[claim] = GangPhase.FINISHED
    story.until(claim, ClaimState.RETURNING)
    story.fleet.broken.add(NODES[0])
    story.until(claim, ClaimState.DONE, 3000)
    assert "replicas on 1 nodes do not come up" in story.claim(claim).reason
    assert pool_name(NODES[0]) in story.loop.seen.pools
