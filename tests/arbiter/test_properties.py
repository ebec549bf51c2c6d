"""Whatever happens, and wherever the arbiter is cut off: the invariants hold and the same end is reached."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from story import NODES, Story, ask, gpu

from tidegate.arbiter.book import ENDED, HOLDING, ClaimState, replay
from tidegate.arbiter.messages import GangPhase, Spillway
from tidegate.ids import Tier

EVENTS = ("file", "finish", "heat", "cool", "crash", "provider", "gateway", "wait", "wait", "wait")


def check(story: Story) -> None:
    book, fleet = story.loop.book, story.fleet
    held: dict[str, str] = {}
    for claim in book.claims.values():
        if claim.state in HOLDING:
            for node in claim.nodes:
                assert node not in held, "two claims hold one node"
                held[node] = claim.id
        if claim.grant is not None and claim.state is ClaimState.GRANTED:
            assert len({g for n in claim.grant.nodes for g in n.gpus}) >= claim.spec.min_gpus
    for node, slots in fleet.slots.items():
        assert fleet.holders(node) <= slots, "a GPU has two holders"
        assert fleet.pools[node].waiting == 0, "a replica waits for a GPU"
    if any(pool.running == 0 for pool in fleet.pools.values()) and held:
        assert book.orders.spillway is Spillway.OPEN, "replicas are gone and overflow has no way out"
    assert book == replay(story.journal.moves), "the journal tells another story"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 5)), min_size=5, max_size=40),
    st.sets(st.integers(0, 60), max_size=4),
)
def test_invariants_hold_and_every_claim_ends(events: list[tuple[str, int]], cuts: set[int]) -> None:
    story = Story()
    story.tick(8)
    filed = 0
    for number, (event, value) in enumerate(events):
        if number in cuts:
            story.fleet.crash_after_moves = value
        match event:
            case "file":
                filed += 1
                story.file(ask(f"run{filed}", gpus=value % 6 + 1, at_least=1, order=value % 2))
            case "finish":
                for claim in list(story.phases):
                    story.phases[claim] = GangPhase.FINISHED
            case "heat":
                story.hot.add(gpu(NODES[value % 3], value % 2))
            case "cool":
                story.hot.clear()
            case "crash":
                story.restart()
            case "provider":
                story.provider_works = value % 2 == 0
            case "gateway":
                story.gateway_follows = value % 2 == 0
            case _:
                pass
        for claim in story.loop.book.claims.values():
            if claim.state is ClaimState.GRANTED:
                story.phases.setdefault(claim.id, GangPhase.RUNNING)
        story.tick()
        check(story)
    story.provider_works = story.gateway_follows = True
    story.hot.clear()
    story.fleet.crash_after_moves = None
    for _ in range(60 * (filed + 2)):
        for claim in story.loop.book.claims.values():
            if claim.state in (ClaimState.GRANTED, ClaimState.RUNNING):
                story.phases[claim.id] = GangPhase.FINISHED
        story.tick()
        check(story)
    assert all(claim.state in ENDED for claim in story.loop.book.claims.values())
    assert [pool.running for pool in story.fleet.pools.values()] == [2, 2, 2]
    assert story.loop.book.orders.spillway is Spillway.CLOSED
    assert story.fleet.groups == {}


def test_cut_off_after_any_move_the_same_end_is_reached() -> None:
    """The arbiter dies after its nth act, for every n of a whole flip with a hot GPU in it."""

    def whole_story(cut: int | None) -> tuple[Story, int]:
        story = Story()
        story.fleet.crash_after_moves = cut
        story.tick(10)
        claim = story.file(ask())
        for _ in range(400):
            if story.claim(claim).state is ClaimState.GRANTED:
                story.phases[claim] = GangPhase.RUNNING
            if story.claim(claim).state is ClaimState.RUNNING:
                story.hot.add(gpu(NODES[0], 1))
                if story.fleet.evicted:
                    story.phases[claim] = GangPhase.FINISHED
            story.tick()
            check(story)
        assert story.claim(claim).state is ClaimState.DONE, f"cut off after {cut}"
        assert {move.gpu for move in story.fleet.evicted} == {gpu(NODES[0], 1)}
        return story, len(story.fleet.applied)

    undisturbed, moves = whole_story(None)
    assert moves > 15
    for cut in range(moves):
        story, _ = whole_story(cut)
        assert story.crashes == 1
        assert [p.running for p in story.fleet.pools.values()] == [p.running for p in undisturbed.fleet.pools.values()]
        assert story.loop.book.orders.spillway is undisturbed.loop.book.orders.spillway
        quarantines = {s: q.verdict.tier for s, q in story.loop.book.quarantines.items()}
        assert quarantines == {(NODES[0], gpu(NODES[0], 1), "temperature"): Tier.SERVE}
