"""Who leaves for whom: classes, notice, places in the queue, and serving against what is below it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from story import NODES, WITH_PROVIDER, Story, ask

from tidegate.arbiter.messages import GangPhase, PoolLoad, Spillway
from tidegate.arbiter.states import ClaimState
from tidegate.ids import ClaimId, NodeId, pool_name
from tidegate.spec.policy import ClaimsSpec, Policy
from tidegate.testing.fake_fleet import FakeFleet

CLASSES = ("urgent", "pretrain", "serving", "scavenger", "idle")
POLICY = WITH_PROVIDER.model_copy(update={"claims": ClaimsSpec(classes=CLASSES, min_run_s=60.0, dwell_s=0.0)})
NINE = tuple(NodeId(letter * 56) for letter in "abcdefghi")


@pytest.fixture
def story() -> Story:
    story = Story(policy=POLICY)
    story.tick(10)
    return story


def states(story: Story, *claims: ClaimId) -> list[str]:
    return [str(story.claim(claim).state) for claim in claims]


def test_a_stronger_class_takes_the_gpus_of_a_weaker_one_which_saves_queues_and_resumes(story: Story) -> None:
    weak = story.file(ask("weak", gpus=6, at_least=6))
    story.train(weak)
    story.tick(5 * 61)
    filed_at_s, step = story.claim(weak).filed_at_s, story.gang(weak).step
    strong = story.file(ask("strong", gpus=6, at_least=6, claim_class="urgent"))
    story.until(weak, ClaimState.PREEMPTED)
    assert "strong goes first" in story.claim(weak).reason
    story.until(weak, ClaimState.QUEUED)
    assert story.gang(weak).phase is GangPhase.LEFT
    assert story.clock.now_s() - story.claim(weak).since_s < 1.0
    assert (story.claim(weak).grant, story.claim(weak).nodes) == (None, ())
    story.train(strong)
    assert story.claim(weak).filed_at_s == filed_at_s
    assert [pool.running for pool in story.fleet.pools.values()] == [0, 0, 0], "no replica slipped in between"
    assert len([m for m in story.journal.moves if m.kind == "set_target" and m.replicas > 0]) == 3
    story.phases[strong] = GangPhase.FINISHED
    story.until(strong, ClaimState.DONE, 2000)
    story.until(weak, ClaimState.RUNNING)
    assert story.claim(weak).attempt == 2
    story.tick()
    assert story.gang(weak).step > step
    story.phases[weak] = GangPhase.FINISHED
    story.until(weak, ClaimState.DONE)


def test_equals_queue_whatever_their_order(story: Story) -> None:
    """C030."""
    first = story.file(ask("first", gpus=6, at_least=6))
    story.train(first)
    story.tick(5 * 61)
    second = story.file(ask("second", order=99))
    story.tick(50)
    assert states(story, first, second) == ["running", "queued"]


def test_the_higher_order_goes_first_however_many_wait(story: Story) -> None:
    """C030: two submitters with many claims each, of order 10 and 1: admission is decided before Ray hears of any."""
    low = [story.file(ask(f"low{number}", gpus=6, at_least=6, order=1)) for number in range(4)]
    high = [story.file(ask(f"high{number}", gpus=6, at_least=6, order=10)) for number in range(4)]
    granted: list[ClaimId] = []
    for _ in range(3000):
        for claim in (*low, *high):
            if story.claim(claim).state is ClaimState.GRANTED and claim not in granted:
                granted.append(claim)
                story.phases[claim] = GangPhase.FINISHED
        story.tick()
        if len(granted) == 8:
            break
    assert granted == [*high, *low]


def test_nobody_is_preempted_before_its_minimum_run_time(story: Story) -> None:
    weak = story.file(ask("weak", gpus=6, at_least=6))
    story.train(weak)
    ran_from_s = story.clock.now_s()
    strong = story.file(ask("strong", gpus=6, at_least=6, claim_class="urgent"))
    story.until(weak, ClaimState.PREEMPTED, 1000)
    assert 59.0 < story.clock.now_s() - ran_from_s < 65.0
    story.until(strong, ClaimState.GRANTED)


def test_what_is_below_serving_leaves_on_notice(story: Story) -> None:
    story.gateway_says["local_busy_replicas"] = 0.0
    weak = story.file(ask("weak", gpus=4, at_least=4, claim_class="scavenger"))
    story.train(weak)
    strong = story.file(ask("strong", gpus=6, at_least=6))
    story.until(strong, ClaimState.GRANTED)
    assert states(story, weak) == ["queued"]


def test_a_gang_that_does_not_leave_is_put_out_when_its_notice_ends(story: Story) -> None:
    story.gateway_says["local_busy_replicas"] = 0.0
    weak = story.file(ask("weak", gpus=4, at_least=4, claim_class="scavenger"))
    story.train(weak)
    story.gang(weak).obeys = False
    strong = story.file(ask("strong", gpus=6, at_least=6))
    story.until(weak, ClaimState.PREEMPTED)
    asked_s = story.clock.now_s()
    story.until(weak, ClaimState.QUEUED)
    assert 30.0 <= story.clock.now_s() - asked_s < 31.0
    assert "notice is over" in story.claim(weak).reason
    story.until(strong, ClaimState.GRANTED)


def test_nobody_leaves_when_that_does_not_help(story: Story) -> None:
    story.gateway_says["local_busy_replicas"] = 0.0
    scavenger = story.file(ask("scavenger", gpus=2, at_least=2, claim_class="scavenger"))
    story.train(scavenger)
    young = story.file(ask("young", gpus=2, at_least=2))
    story.train(young)
    strong = story.file(ask("strong", gpus=6, at_least=6, claim_class="urgent"))
    story.tick(20)
    assert states(story, scavenger, young, strong) == ["running", "running", "queued"]


def nine(*claims: tuple[str, str, int, int]) -> tuple[Story, dict[str, ClaimId]]:
    """Nine nodes without serving, filled by claims: name, class, order, GPUs."""
    story = Story(policy=POLICY, fleet=FakeFleet(slots=dict.fromkeys(NINE, 2), serves=False))
    held = {}
    for name, claim_class, order, gpus in claims:
        held[name] = story.file(ask(name, gpus=gpus, at_least=gpus, claim_class=claim_class, order=order))
        story.train(held[name])
    story.tick(5 * 61)
    return story, held


def asked_to_leave(story: Story, held: dict[str, ClaimId], gpus: int) -> set[str]:
    strong = story.file(ask("strong", gpus=gpus, at_least=gpus, claim_class="urgent"))
    story.until(strong, ClaimState.GRANTED)
    return {name for name, claim in held.items() if story.claim(claim).state is ClaimState.QUEUED}


def test_the_weakest_class_leaves_first_then_the_lowest_order() -> None:
    four = (("p", "pretrain", 0, 6), ("s1", "scavenger", 1, 6), ("s0", "scavenger", 0, 4), ("i", "idle", 9, 2))
    story, held = nine(*four)
    assert asked_to_leave(story, held, 2) == {"i"}
    story, held = nine(("p", "pretrain", 0, 6), ("s1", "scavenger", 1, 6), ("s0", "scavenger", 0, 6))
    assert asked_to_leave(story, held, 6) == {"s0"}
    story, held = nine(("p", "pretrain", 0, 6), ("s1", "scavenger", 1, 6), ("s0", "scavenger", 0, 6))
    assert asked_to_leave(story, held, 14) == {"s0", "s1", "p"}


def test_who_has_just_saved_leaves_before_who_has_not() -> None:
    story, held = nine(("old", "scavenger", 0, 6), ("fresh", "scavenger", 0, 6), ("older", "scavenger", 0, 6))
    for name in ("old", "older"):
        story.gang(held[name]).checkpoint_every_s = None
    story.tick(50)
    assert asked_to_leave(story, held, 4) == {"fresh"}


def test_nobody_leaves_who_is_not_needed() -> None:
    """The small one is weaker and is asked first, but the large one is needed anyway and is enough alone."""
    story, held = nine(("small", "idle", 0, 2), ("large", "scavenger", 0, 16))
    assert asked_to_leave(story, held, 16) == {"large"}


def test_a_claim_that_fits_without_it_takes_nothing_from_others() -> None:
    story, held = nine(("weak", "scavenger", 0, 12))
    strong = story.file(ask("strong", gpus=18, at_least=6, claim_class="urgent"))
    story.until(strong, ClaimState.GRANTED)
    assert states(story, held["weak"]) == ["running"]
    assert len(story.claim(strong).nodes) == 3


def test_scavengers_fill_what_a_waiting_claim_cannot_use() -> None:
    story, held = nine(("p", "pretrain", 0, 12))
    waits = story.file(ask("waits", gpus=18, at_least=18))
    story.tick(3)
    fills = story.file(ask("fills", gpus=6, at_least=2, claim_class="scavenger"))
    story.train(fills)
    assert states(story, waits, held["p"]) == ["queued", "running"]


def test_a_preempted_claim_that_is_released_or_ends_is_done(story: Story) -> None:
    weak = story.file(ask("weak", gpus=6, at_least=6))
    story.train(weak)
    story.tick(5 * 61)
    story.gang(weak).obeys = False
    strong = story.file(ask("strong", gpus=6, at_least=6, claim_class="urgent"))
    story.until(weak, ClaimState.PREEMPTED)
    story.loop.release(weak, "the job was stopped")
    story.until(weak, ClaimState.DONE)
    story.until(strong, ClaimState.GRANTED)


def test_a_claim_that_once_ran_and_is_released_in_the_queue_is_done_not_undone(story: Story) -> None:
    weak = story.file(ask("weak", gpus=6, at_least=6))
    story.train(weak)
    story.tick(5 * 61)
    story.file(ask("strong", gpus=6, at_least=6, claim_class="urgent"))
    story.until(weak, ClaimState.QUEUED)
    story.loop.release(weak, "enough")
    story.until(weak, ClaimState.DONE)


def test_patience_ends_in_the_queue(story: Story) -> None:
    story.train(story.file(ask("first", gpus=6, at_least=6)))
    waits = story.file(replace(ask("waits"), patience_s=20.0))
    story.until(waits, ClaimState.UNDONE)
    assert "its turn did not come within 20 s: fewer than 3 fit GPUs" in story.claim(waits).reason
    assert 20.0 < story.clock.now_s() - story.claim(waits).filed_at_s < 21.0


# --- serving against what is below it ---------------------------------------------------------------------------


def idle(policy: Policy = POLICY, **what: Any) -> Story:
    """Serving has every GPU, and nobody asks it for anything."""
    story = Story(policy=policy, **what)
    story.tick(10)
    story.gateway_says["local_busy_replicas"] = 0.0
    return story


def test_idle_replicas_give_way_to_a_scavenger_and_come_back_with_the_traffic() -> None:
    """C031, both ways: training takes what is idle, serving takes it back when requests overflow."""
    story = idle()
    claim = story.file(ask(gpus=6, at_least=2, claim_class="scavenger"))
    story.train(claim)
    assert len(story.claim(claim).nodes) == 2, "one replica more than is busy stays, so one whole node does"
    assert sum(pool.running for pool in story.fleet.pools.values()) == 2
    assert not story.reasons("probe"), "nothing overflows, so nothing has to be proven"
    story.gateway_says["waiting"] = 3
    burst_s = story.clock.now_s()
    story.until(claim, ClaimState.PREEMPTED)
    assert 5.0 <= story.clock.now_s() - burst_s < 6.0
    assert "serving needs its GPUs: 3 requests overflow" in story.claim(claim).reason
    story.until(claim, ClaimState.QUEUED)
    story.tick(10)
    assert sum(pool.running for pool in story.fleet.pools.values()) == 6
    story.tick(50)
    assert states(story, claim) == ["queued"], "while requests overflow nothing is lent again"
    del story.gateway_says["waiting"]
    story.until(claim, ClaimState.RUNNING)


def test_busy_replicas_are_not_lent() -> None:
    story = Story(policy=POLICY)
    story.tick(10)
    story.gateway_says["local_busy_replicas"] = 3.2
    claim = story.file(ask(gpus=6, at_least=2, claim_class="scavenger"))
    story.tick(20)
    assert states(story, claim) == ["queued"]
    story.gateway_says["local_busy_replicas"] = 2.9
    story.until(claim, ClaimState.GRANTED)
    assert len(story.claim(claim).nodes) == 1, "3 + 1 replicas stay"


def test_requests_on_the_way_count_though_the_last_minute_was_idle() -> None:
    story = idle()
    story.gateway_says["pools"] = tuple(PoolLoad(pool=pool_name(node), replicas=2, ongoing=2) for node in NODES)
    claim = story.file(ask(gpus=6, at_least=2, claim_class="scavenger"))
    story.tick(20)
    assert states(story, claim) == ["queued"]


def test_a_burst_that_passes_takes_nothing_back() -> None:
    story = idle()
    claim = story.file(ask(gpus=6, at_least=2, claim_class="scavenger"))
    story.train(claim)
    for _ in range(20):
        story.gateway_says["waiting"] = 3
        story.tick(20)
        story.gateway_says["waiting"] = 0
        story.tick(1)
    assert states(story, claim) == ["running"]


def test_gateways_that_are_gone_need_nothing() -> None:
    story = idle()
    claim = story.file(ask(gpus=6, at_least=2, claim_class="scavenger"))
    story.train(claim)
    story.gateway_says["waiting"] = 3
    story.tick(5)
    story.silent_gateway = True
    story.tick(100)
    assert states(story, claim) == ["running"]


def test_overflow_leaves_at_once_when_a_stronger_claim_takes_what_was_lent() -> None:
    story = idle()
    weak = story.file(ask("weak", gpus=4, at_least=4, claim_class="scavenger"))
    story.train(weak)
    assert story.loop.book.orders.spillway is Spillway.CLOSED
    strong = story.file(ask("strong", gpus=4, at_least=4, claim_class="urgent"))
    story.until(strong, ClaimState.GRANTED)
    assert story.loop.book.orders.spillway is Spillway.OPEN


def test_only_as_many_leave_as_the_overflow_needs() -> None:
    story = idle(fleet=FakeFleet(slots=dict.fromkeys(NINE, 2)))
    claims = [story.file(ask(f"s{n}", gpus=2, at_least=2, claim_class="scavenger")) for n in range(6)]
    for claim in claims:
        story.train(claim)
    story.gateway_says["waiting"] = 4
    story.until(claims[0], ClaimState.PREEMPTED)
    assert states(story, *claims).count("preempted") == 2
    assert Policy().serving.reclaim_after_s == 5.0


# --- dwell ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dwell_s", [5.0, 20.0])
def test_claims_filed_and_released_every_second_do_not_make_serving_flap(dwell_s: float) -> None:
    """C003 for GPUs: whatever load flaps, a node changes hands at most once in the dwell time."""
    policy = POLICY.model_copy(update={"claims": ClaimsSpec(classes=CLASSES, dwell_s=dwell_s)})
    story = Story(policy=policy)
    story.tick(10)
    began_s, number = story.clock.now_s(), 0
    while story.clock.now_s() - began_s < 120.0:
        number += 1
        claim = story.file(ask(f"run{number}", gpus=6, at_least=2))
        story.tick(5)
        story.loop.release(claim, "changed my mind")
    taken: dict[NodeId, list[float]] = {node: [] for node in NODES}
    for move in story.journal.moves:
        if move.kind == "advance" and move.to is ClaimState.DRAINING:
            for node in move.nodes:
                taken[node].append(move.at_s)
    for flips in taken.values():
        assert 1 <= len(flips) <= 120.0 / dwell_s + 1
    assert "what came home stays for" in " ".join(story.reasons("advance"))


def test_a_claim_that_has_waited_for_the_dwell_time_itself_gets_them_at_once() -> None:
    policy = POLICY.model_copy(update={"claims": ClaimsSpec(classes=CLASSES, dwell_s=60.0)})
    story = Story(policy=policy)
    story.tick(10)
    first = story.file(ask("first", gpus=6, at_least=6))
    story.train(first)
    second = story.file(ask("second", gpus=6, at_least=6))
    story.tick(5 * 61)
    story.phases[first] = GangPhase.FINISHED
    story.until(second, ClaimState.GRANTED, 60)
    assert max(pool.running for pool in story.fleet.pools.values()) == 0, "they went from one to the other"


def test_nobody_leaves_in_the_stead_of_nodes_that_rest() -> None:
    policy = POLICY.model_copy(update={"claims": ClaimsSpec(classes=CLASSES, dwell_s=20.0)})
    story = idle(policy)
    scavenger = story.file(ask("scavenger", gpus=2, at_least=2, claim_class="scavenger"))
    story.train(scavenger)
    first = story.file(ask("first", gpus=4, at_least=4))
    story.train(first)
    story.phases[first] = GangPhase.FINISHED
    story.until(first, ClaimState.DONE)
    second = story.file(ask("second", gpus=2, at_least=2))
    story.until(second, ClaimState.GRANTED)
    assert states(story, scavenger) == ["running"]
