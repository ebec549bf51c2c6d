"""Pools follow the nodes, in an arbiter over a fleet in memory."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from story import NODES, WITH_PROVIDER, Story, ask

from tidegate.arbiter.messages import PoolPlan
from tidegate.arbiter.moves import LayPools, SetTarget
from tidegate.arbiter.pools import LAY_EVERY_S
from tidegate.arbiter.states import ClaimState
from tidegate.ids import NodeId, pool_name
from tidegate.testing.fake_fleet import FakeFleet

NEW = NodeId("d" * 56)
PLAN = PoolPlan(builder="m:f", args={}, version="v1", at_s=1.0)
LAYING_TICKS = int(LAY_EVERY_S / 0.2) + 20


@pytest.fixture
def story() -> Story:
    fleet = FakeFleet(slots=dict.fromkeys(NODES, 2), lays=True)
    story = Story(policy=WITH_PROVIDER, fleet=fleet, gateway_says={"plan": PLAN})
    story.tick(20)
    return story


def laid(story: Story) -> list[LayPools]:
    return [move for move in story.fleet.applied if isinstance(move, LayPools)]


def running(story: Story) -> dict[NodeId, int]:
    return {node: pool.running for node, pool in story.fleet.pools.items()}


def test_each_node_gets_a_pool_and_its_free_gpus_serve(story: Story) -> None:
    assert running(story) == dict.fromkeys(NODES, 2)
    assert [move.reason for move in laid(story)] == ["3 nodes have joined"]
    assert story.loop.book.orders.allowances == {pool_name(node): 2 for node in NODES}


def test_a_node_that_joins_serves_and_one_that_leaves_is_forgotten(story: Story) -> None:
    story.fleet.join(NEW, 2)
    story.tick(LAYING_TICKS)
    assert running(story) == dict.fromkeys((*NODES, NEW), 2)
    story.fleet.lose(NEW)
    story.tick(LAYING_TICKS)
    assert [move.reason for move in laid(story)][1:] == ["1 nodes have joined", "1 nodes are gone"]
    assert story.fleet.strays == set()
    assert pool_name(NEW) not in story.loop.book.targets
    assert pool_name(NEW) not in story.loop.book.orders.allowances
    assert running(story) == dict.fromkeys(NODES, 2), "the others are left alone"


def test_nodes_that_join_one_after_the_other_get_their_pools_together(story: Story) -> None:
    for letter in "defg":
        story.fleet.join(NodeId(letter * 56), 1)
        story.tick()
    story.tick(2 * LAYING_TICKS)
    assert len(laid(story)) <= 3
    assert sum(running(story).values()) == 6 + 4


def test_a_node_that_joins_while_a_claim_holds_all_gets_a_pool_that_takes_nothing_from_the_gang(story: Story) -> None:
    claim = story.file(ask(gpus=8, at_least=6))
    story.until(claim, ClaimState.GRANTED)
    story.fleet.join(NEW, 2)
    story.tick(LAYING_TICKS)
    held = story.claim(claim).held
    assert {node: pool.running for node, pool in story.fleet.pools.items() if node in held} == dict.fromkeys(held, 0)
    for move in laid(story):
        assert all(count == 0 for node, count in move.targets.items() if node in held or move is laid(story)[0])


def test_a_draining_node_hands_its_replicas_back_before_it_goes(story: Story) -> None:
    """C006, C007: the mark is seen, requests go elsewhere first, and no replica is started on what leaves."""
    story.fleet.drains[NODES[0]] = story.clock.now_s() + 60
    story.tick(10)
    assert running(story)[NODES[0]] == 0
    assert story.loop.book.orders.allowances[pool_name(NODES[0])] == 0
    assert any("its node is to go" in reason for reason in story.reasons("set_target"))
    story.tick(50)
    assert running(story) == {NODES[0]: 0, NODES[1]: 2, NODES[2]: 2}
    story.fleet.join(NEW, 2)
    story.fleet.drains[NEW] = story.clock.now_s() + 60
    story.tick(LAYING_TICKS)
    assert NEW not in story.fleet.pools, "a node that is to go gets none"


def test_a_newer_plan_is_built_once_and_keeps_targets(story: Story) -> None:
    story.gateway_says["plan"] = replace(PLAN, version="v2", at_s=2.0)
    story.tick(LAYING_TICKS)
    assert {pool.plan for pool in story.fleet.pools.values()} == {"v2"}
    (_, again) = laid(story)
    assert dict(again.targets) == dict.fromkeys(NODES, 2)
    story.gateway_says["plan"] = replace(PLAN, version="v2", at_s=3.0)  # the gateway was restarted, no more
    story.tick(LAYING_TICKS)
    assert len(laid(story)) == 2


def test_while_the_serve_controller_is_away_nothing_is_built_anew(story: Story) -> None:
    """An unseen pool is not a lacking one: what has been seen comes back with the controller, targets and all."""
    hidden, story.fleet.pools = story.fleet.pools, {}
    story.fleet.serves = False
    story.tick(LAYING_TICKS)
    story.fleet.serves, story.fleet.pools = True, hidden
    story.tick(LAYING_TICKS)
    assert len(laid(story)) == 1
    assert running(story) == dict.fromkeys(NODES, 2)


def test_pools_go_after_their_application(story: Story) -> None:
    story.fleet.serves = False
    story.tick(LAYING_TICKS)
    assert story.fleet.pools == {}
    assert laid(story)[-1].plan is None


@pytest.mark.parametrize("seed", range(8))
def test_whatever_joins_and_leaves_in_the_end_each_node_serves(seed: int) -> None:
    """Also over crashes of the arbiter between writing a move down and carrying it out."""
    chance = random.Random(seed)
    fleet = FakeFleet(slots=dict.fromkeys(NODES, 2), lays=True)
    story = Story(policy=WITH_PROVIDER, fleet=fleet, gateway_says={"plan": PLAN})
    for number in range(20):
        if chance.random() < 0.5 or len(fleet.slots) < 2:
            fleet.join(NodeId(f"{number:02d}" * 28), chance.choice((1, 2, 8)))
        else:
            fleet.lose(chance.choice(sorted(fleet.slots)))
        if chance.random() < 0.3:
            fleet.crash_after_moves = chance.randrange(3)
        story.tick(chance.randrange(1, 40))
    fleet.crash_after_moves = None
    story.tick(3 * LAYING_TICKS)
    assert running(story) == dict(fleet.slots)
    moves = len(fleet.applied)
    story.tick(50)
    assert len(fleet.applied) == moves, "and then there is rest"
    raised = [move for move in fleet.applied if isinstance(move, SetTarget)]
    assert all(move.replicas >= 0 for move in raised)
