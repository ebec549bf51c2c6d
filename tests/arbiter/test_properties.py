"""Whatever happens, and wherever the arbiter is cut off: the invariants hold and the same end is reached."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from story import WITH_PROVIDER, Story, ask, gpu

from tidegate.arbiter.book import Book, replay
from tidegate.arbiter.messages import GangPhase, Spillway
from tidegate.arbiter.snapshot import book_from_json, book_to_json
from tidegate.arbiter.states import ENDED, HOLDING, ClaimState
from tidegate.arbiter.view import tier_of
from tidegate.ids import ClaimId, NodeId, Tier
from tidegate.spec.policy import ClaimsSpec, FleetBrakeSpec, HealthSpec, ServingSpec
from tidegate.testing.fake_fleet import FakeFleet

NODES = tuple(NodeId(letter * 56) for letter in "abcd")
CLASSES = ("urgent", "pretrain", "serving", "scavenger")
POLICY = WITH_PROVIDER.model_copy(
    update={
        "claims": ClaimsSpec(classes=CLASSES, min_run_s=4.0, preempt_notice_s=3.0, dwell_s=2.0),
        "serving": ServingSpec(floor_replicas=2, drain_deadline_s=2.0, reclaim_after_s=1.0),
        "health": HealthSpec(fleet_brake=FleetBrakeSpec(node_share=1.0)),
    }
)


def new_story() -> Story:
    story = Story(policy=POLICY, fleet=FakeFleet(slots=dict.fromkeys(NODES, 2)))
    story.gateway_says["local_busy_replicas"] = 1.0
    return story


def check(story: Story, before: Book) -> None:
    """What holds after every tick; `before` is the book that it began with."""
    book, fleet = story.loop.book, story.fleet
    _no_gpu_has_two_holders(story)
    for claim in book.claims.values():
        if claim.grant is None or claim.state not in (ClaimState.GRANTED, ClaimState.RUNNING):
            continue
        given_now = claim.grant.generation > before.generation
        granted = [g for n in claim.grant.nodes for g in n.gpus]
        assert len(granted) == len(set(granted))
        if given_now:
            there = {gpu(node, index) for node, slots in fleet.slots.items() for index in range(slots)}
            assert set(granted) <= there, "a grant of GPUs that do not live"
            unfit = [g for n in claim.grant.nodes for g in n.gpus if tier_of(before, n.node, g) is not Tier.GANG]
            assert not unfit, "a grant of GPUs that are out"
            assert claim.spec.min_gpus <= len(granted)
    for node, slots in fleet.slots.items():
        assert fleet.holders(node) <= slots, "a GPU has two holders"
        assert node not in fleet.pools or fleet.pools[node].waiting == 0 or node in fleet.broken, (
            "a replica waits for a GPU"
        )
    taken = {n for c in book.claims.values() for n in c.held} - {n for c in before.claims.values() for n in c.held}
    if any(node in fleet.pools for node in taken):
        left = sum(pool.running for node, pool in fleet.pools.items() if node not in book.holders)
        assert left >= POLICY.serving.floor_replicas, "a flip has broken the floor"
    for claim in book.open_claims():
        assert claim.reason, "a claim waits without a reason"
    assert book == replay(story.journal.moves), "the journal tells another story"
    kept = json.loads(json.dumps(book_to_json(book)))
    assert book == book_from_json(kept), "the book is another one when it was kept"


def _no_gpu_has_two_holders(story: Story) -> None:
    held: dict[str, list[ClaimState]] = {}
    for claim in story.loop.book.claims.values():
        for node in claim.held:
            held.setdefault(node, []).append(claim.state)
    for states in held.values():
        # One that was asked to leave, and the one that drains towards its nodes: the group of the second is not ready.
        assert len(states) == 1 or sorted(states) == [ClaimState.DRAINING, ClaimState.PREEMPTED], states
    for node in story.fleet.slots:
        ready = [name for name in story.fleet.ready if node in story.fleet.groups[name]]
        assert len(ready) <= 1, "two placement groups have one node"
        standing = [g.claim for g in story.gangs.values() if g.holds(node) and story.phases.get(g.claim) is not None]
        alive = [c for c in standing if story.claim(c).state in HOLDING and story.claim(c).grant is not None]
        assert len(alive) <= 1, "ranks of two gangs on one node"


def happen(story: Story, event: str, value: int) -> None:
    fleet, now_s = story.fleet, story.clock.now_s()
    node = NODES[value % len(NODES)]
    match event:
        case "file":
            claim_class = ("pretrain", "scavenger", "urgent")[value % 3]
            number = len(story.loop.book.claims)
            story.file(ask(f"run{number}", gpus=value % 8 + 1, at_least=1, order=value % 2, claim_class=claim_class))
        case "finish":
            for claim in sorted(story.phases)[value % 2 :: 2]:
                story.phases[claim] = GangPhase.FINISHED
        case "release":
            for claim in sorted(story.loop.book.claims)[value % 3 :: 3]:
                story.loop.release(claim, "changed my mind")
        case "disobey":
            for gang in list(story.gangs.values())[value % 2 :: 2]:
                gang.obeys = not gang.obeys
        case "heat":
            (story.hot if value % 3 else story.lost).add(gpu(node, value % 2))
        case "cool":
            story.hot.clear()
            story.lost.clear()
        case "drain" if node in fleet.slots:
            fleet.drains[node] = now_s + 4.0
        case "lose" if node in fleet.slots and len(fleet.slots) > 1:
            fleet.lose(node)
        case "join" if node not in fleet.slots:
            fleet.join(node, 2)
        case "crash":
            story.restart()
        case "provider":
            story.provider_works = value % 2 == 0
        case "gateway":
            story.gateway_follows = value % 2 == 0
        case "traffic":
            story.gateway_says["waiting"] = value % 3
            story.gateway_says["local_busy_replicas"] = float(value % 5)
        case _:
            pass


def _go_on(story: Story) -> None:
    """Gangs begin when they are granted; a draining node goes when it said it would."""
    for claim in story.loop.book.claims.values():
        if claim.state is ClaimState.GRANTED:
            story.phases.setdefault(claim.id, GangPhase.RUNNING)
    for node, at_s in list(story.fleet.drains.items()):
        if story.clock.now_s() >= at_s and len(story.fleet.slots) > 1:
            story.fleet.lose(node)


def tick(story: Story) -> None:
    _go_on(story)
    before = story.loop.book
    story.tick()
    check(story, before)


EVENTS = (
    *("file", "file", "file", "finish", "release", "disobey", "heat", "cool", "drain", "lose", "join"),
    *("crash", "provider", "gateway", "traffic", "wait"),
)


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 23), st.integers(1, 8)), min_size=5, max_size=40),
    st.sets(st.integers(0, 60), max_size=6),
)
def test_invariants_hold_and_every_claim_ends(events: list[tuple[str, int, int]], cuts: set[int]) -> None:
    story = new_story()
    for _ in range(8):
        tick(story)
    for number, (event, value, ticks) in enumerate(events):
        if number in cuts:
            story.fleet.crash_after_moves = value % 6
        happen(story, event, value)
        for _ in range(ticks):
            tick(story)
    _calm_down(story)
    until_quiet(story, finish=True)
    _is_as_before(story)


def until_quiet(story: Story, *, finish: bool) -> None:
    """Until all claims have ended and nothing has moved for longer than a rest between two steps home."""
    quiet = 0
    for _ in range(600 + 150 * len(story.loop.book.claims)):
        for claim in story.loop.book.claims.values():
            if finish and claim.state in (ClaimState.GRANTED, ClaimState.RUNNING):
                story.phases[claim.id] = GangPhase.FINISHED
        tick(story)
        quiet = 0 if story.loop.decision.moves else quiet + 1
        if quiet > 15 and all(claim.state in ENDED for claim in story.loop.book.claims.values()):
            return


def _calm_down(story: Story) -> None:
    story.provider_works = story.gateway_follows = True
    story.gateway_says = {"local_busy_replicas": 0.0}
    story.hot.clear()
    story.lost.clear()
    story.fleet.crash_after_moves = None
    for gang in story.gangs.values():
        gang.obeys = True
    for node in list(story.fleet.drains):
        story.fleet.lose(node)
    for node in NODES:
        if node not in story.fleet.slots:
            story.fleet.join(node, 2)


def _is_as_before(story: Story) -> None:
    ends = {claim.id: (str(claim.state), claim.reason) for claim in story.loop.book.claims.values()}
    assert all(claim.state in ENDED for claim in story.loop.book.claims.values()), ends
    assert [pool.running for pool in story.fleet.pools.values()] == [2, 2, 2, 2]
    assert story.loop.book.orders.spillway is Spillway.CLOSED
    assert story.fleet.groups == {}
    for claim in story.loop.book.claims.values():
        assert claim.ever_ran <= (claim.state is ClaimState.DONE), "a claim that ran was undone"


# --- cut off after any act --------------------------------------------------------------------------------------


def hot_gpu(story: Story, claims: dict[str, ClaimId]) -> None:
    if story.claim(claims["run"]).state is ClaimState.RUNNING:
        story.hot.add(gpu(NODES[0], 1))


def lost_node(story: Story, claims: dict[str, ClaimId]) -> None:
    claim = story.claim(claims["run"])
    if claim.state is ClaimState.RUNNING and claim.attempt == 1 and len(story.fleet.slots) == 4:
        story.fleet.lose(claim.nodes[-1])


def evicted_node(story: Story, claims: dict[str, ClaimId]) -> None:
    claim = story.claim(claims["run"])
    if claim.state is ClaimState.RUNNING and claim.attempt == 1:
        story.lost.add(gpu(claim.nodes[0], 0))


def stronger_claim(story: Story, claims: dict[str, ClaimId]) -> None:
    claim = story.claim(claims["run"])
    ran_s = story.clock.now_s() - (claim.runs_since_s or story.clock.now_s())
    if "strong" not in claims and claim.state is ClaimState.RUNNING and ran_s > POLICY.claims.min_run_s:
        claims["strong"] = story.file(ask("strong", gpus=6, at_least=6, claim_class="urgent"))
    if "strong" in claims and story.claim(claims["strong"]).state is ClaimState.RUNNING:
        story.phases[claims["strong"]] = GangPhase.FINISHED


def ends_well(story: Story, claims: dict[str, ClaimId]) -> tuple[object, ...]:
    book = story.loop.book
    return (
        {name: str(story.claim(claim).state) for name, claim in claims.items()},
        [pool.running for pool in story.fleet.pools.values()],
        book.orders.spillway,
        {hold: q.verdict.tier for hold, q in book.quarantines.items()},
        story.fleet.groups,
    )


@pytest.mark.parametrize("trouble", [hot_gpu, lost_node, evicted_node, stronger_claim])
def test_cut_off_after_any_act_the_same_end_is_reached(
    trouble: Callable[[Story, dict[str, ClaimId]], None],
) -> None:
    """The arbiter dies after its nth act, for every n of a whole run with some trouble in it."""

    def whole_story(cut: int | None) -> tuple[Story, dict[str, ClaimId]]:
        story = new_story()
        story.fleet.crash_after_moves = cut
        for _ in range(10):
            tick(story)
        claims = {"run": story.file(ask(gpus=4, at_least=2))}
        if trouble is stronger_claim:
            claims = {"run": story.file(ask(gpus=6, at_least=6))}
        for _ in range(90):
            trouble(story, claims)
            tick(story)
        story.phases[claims["run"]] = GangPhase.FINISHED
        until_quiet(story, finish=False)
        return story, claims

    undisturbed, claims = whole_story(None)
    acts = len(undisturbed.fleet.applied)
    assert set(ends_well(undisturbed, claims)[0].values()) == {"done"}  # type: ignore[attr-defined]
    assert undisturbed.claim(claims["run"]).attempt == (1 if trouble is hot_gpu else 2)
    assert acts > 15
    for cut in range(acts):
        story, claims = whole_story(cut)
        assert story.crashes == 1
        assert ends_well(story, claims) == ends_well(undisturbed, claims), f"cut off after {cut}"
