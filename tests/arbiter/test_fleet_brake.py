"""One rule must not empty the fleet: what it finds beyond a few nodes is kept, shown, and left to a person."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from story import NODES, Story, ask, gpu, verdict

from tidegate.arbiter.book import Book, apply, replay
from tidegate.arbiter.journal import FileJournal
from tidegate.arbiter.loop import ArbiterLoop
from tidegate.arbiter.messages import GangPhase, GpuSeen, HealthReport
from tidegate.arbiter.moves import Brake, Impose
from tidegate.arbiter.quarantines import quarantine_moves
from tidegate.arbiter.states import ClaimState
from tidegate.arbiter.status import status_of
from tidegate.arbiter.view import DOMAIN_LABEL, NodeSeen, View
from tidegate.ids import NodeId, Tier
from tidegate.spec.policy import FleetBrakeSpec
from tidegate.telemetry.goodput import SpanBook
from tidegate.testing.fake_fleet import FakeFleet

NOW = 1_000_000.0
SPEC = FleetBrakeSpec()


def fleet(count: int) -> tuple[NodeId, ...]:
    return tuple(NodeId(f"{number:04d}" * 14) for number in range(count))


def view(
    nodes: tuple[NodeId, ...], hot: set[NodeId], *, domains: dict[NodeId, str] | None = None, lost: bool = False
) -> View:
    reports = {
        node: HealthReport(
            node=node,
            at_s=NOW,
            gpus=(GpuSeen(uuid=gpu(node, 0), index=0),),
            verdicts=(verdict(node, gpu(node, 0), NOW, lost=lost),) if node in hot else (),
        )
        for node in nodes
    }
    labels = {node: {DOMAIN_LABEL: (domains or {}).get(node, "")} for node in nodes}
    return View(
        nodes={n: NodeSeen(id=n, address="", gpu_slots=1, free_gpu_slots=0, labels=labels[n]) for n in nodes},
        pools={},
        groups={},
        gateways={},
        health=reports,
        gangs={},
    )


def follow(book: Book, seen: View, now_s: float = NOW, spec: FleetBrakeSpec = SPEC) -> Book:
    for move in quarantine_moves(book, seen, spec, now_s)[0]:
        book = apply(book, move)
    return book


def out(book: Book) -> set[NodeId]:
    return {node for node, _, _ in book.quarantines}


def kept(book: Book) -> set[NodeId]:
    return {node for node, _, _ in book.held_back}


@pytest.mark.parametrize(("nodes", "allowed"), [(1, 1), (3, 1), (19, 1), (20, 2), (100, 10)])
def test_no_more_than_a_tenth_and_always_one(nodes: int, allowed: int) -> None:
    names = fleet(nodes)
    book = follow(Book(), view(names, set(names)))
    assert len(out(book)) == allowed
    assert len(kept(book)) == nodes - allowed


def test_no_more_than_three_of_one_domain() -> None:
    names = fleet(100)
    in_rack = {node: "rack-1" for node in names[:4]}
    book = follow(Book(), view(names, set(names[:4]), domains=in_rack))
    assert (len(out(book)), len(kept(book))) == (3, 1)
    (finding,) = book.held_back.values()
    assert "3 nodes of domain rack-1 within 600 s" in finding.reason
    assert len(out(follow(Book(), view(names, set(names[:4]))))) == 4, "nodes without the label are no domain"


def test_the_brake_stays_on_until_the_findings_end() -> None:
    """Time alone does not release it: a rule gone mad would else take out a node every ten minutes."""
    names = fleet(3)
    book = follow(Book(), view(names, {names[0], names[1]}))
    assert (out(book), kept(book)) == ({names[0]}, {names[1]})
    book = follow(book, view(names, {names[0], names[1], names[2]}), NOW + 3000)
    assert (out(book), kept(book)) == ({names[0]}, {names[1], names[2]})
    book = follow(book, view(names, {names[0]}), NOW + 3001)
    assert (out(book), kept(book)) == ({names[0]}, set())
    book = follow(book, view(names, {names[0], names[2]}), NOW + 3002)
    assert out(book) == {names[0], names[2]}, "the window is over, and nothing is held back any more"


def test_what_was_lifted_still_counts_within_the_window() -> None:
    names = fleet(3)
    book = follow(Book(), view(names, {names[0]}))
    book = follow(book, view(names, set()), NOW + 100)
    assert out(book) == set()
    book = follow(book, view(names, {names[1]}), NOW + 599)
    assert (out(book), kept(book)) == (set(), {names[1]})
    book = follow(book, view(names, set()), NOW + 601)
    assert out(follow(book, view(names, {names[1]}), NOW + 602)) == {names[1]}


def test_a_second_gpu_of_a_node_that_is_out_is_no_further_node() -> None:
    names = fleet(3)
    book = follow(Book(), view(names, {names[0]}))
    seen = view(names, {names[0]})
    second = verdict(names[0], gpu(names[0], 1), NOW, lost=False)
    report = seen.health[names[0]]
    both = {**seen.health, names[0]: HealthReport(node=names[0], at_s=NOW, gpus=report.gpus, verdicts=(second,))}
    moves, _ = quarantine_moves(book, replace(seen, health=both), SPEC, NOW)
    assert [type(move) for move in moves if isinstance(move, Impose | Brake)] == [Impose]
    book = follow(book, view(names, {names[0], names[1]}), NOW + 700)
    book = follow(book, view(names, {names[0], names[1], names[2]}), NOW + 701)
    assert kept(book) == {names[2]}, "the brake is on"
    third = HealthReport(
        node=names[0],
        at_s=NOW,
        gpus=report.gpus,
        verdicts=(*report.verdicts, verdict(names[0], gpu(names[0], 2), NOW, lost=False)),
    )
    seen = view(names, {names[0], names[1], names[2]})
    book = follow(book, replace(seen, health={**seen.health, names[0]: third}), NOW + 702)
    assert kept(book) == {names[2]}, "the first node is out for longer than the window, and still no further one"
    assert out(book) == {names[0], names[1]}


def test_hard_faults_are_never_braked() -> None:
    names = fleet(5)
    assert len(out(follow(Book(), view(names, set(names), lost=True)))) == 5
    soft = FleetBrakeSpec(hard_faults=())
    assert len(out(follow(Book(), view(names, set(names), lost=True), spec=soft))) == 1


def test_rules_are_braked_one_by_one() -> None:
    names = fleet(3)
    book = follow(Book(), view(names, {names[0], names[1]}))
    book = follow(book, view(names, {names[0], names[1]}, lost=True), spec=FleetBrakeSpec(hard_faults=()))
    assert Counter(rule for _, _, rule in book.quarantines) == {"gpu_lost": 1}
    assert Counter(rule for _, _, rule in book.held_back) == {"gpu_lost": 1}


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sets(st.integers(0, 29)), st.floats(1, 300)), max_size=30))
def test_never_more_within_any_window_whatever_flaps(steps: list[tuple[set[int], float]]) -> None:
    names = fleet(30)
    book, now_s = Book(), NOW
    imposed: list[tuple[float, NodeId]] = []
    journal = []
    for hot, pause_s in steps:
        now_s += pause_s
        moves, _ = quarantine_moves(book, view(names, {names[number] for number in hot}), SPEC, now_s)
        for move in moves:
            journal.append(move)
            if isinstance(move, Impose):
                imposed.append((now_s, move.verdict.node))
        book = replay(journal)
        recent = {node for at_s, node in imposed if now_s - at_s < SPEC.window_s}
        assert len(recent) <= 3
        assert {names[number] for number in hot} == out(book) | kept(book), "a finding got lost"


# --- as people meet it ------------------------------------------------------------------------------------------


@pytest.fixture
def story() -> Story:
    story = Story()
    story.tick(10)
    return story


def train(story: Story) -> None:
    claim = story.file(ask())
    story.until(claim, ClaimState.GRANTED)
    story.phases[claim] = GangPhase.RUNNING
    story.until(claim, ClaimState.RUNNING)


def test_the_first_hot_gpu_leaves_at_once_the_second_nodes_stays_and_is_shown(story: Story) -> None:
    train(story)
    story.hot.add(gpu(NODES[0], 0))
    story.tick(2)
    assert [move.gpu for move in story.fleet.evicted] == [gpu(NODES[0], 0)]
    story.hot.add(gpu(NODES[1], 1))
    story.tick(50)
    assert [move.gpu for move in story.fleet.evicted] == [gpu(NODES[0], 0)]
    assert story.reasons("brake") == [
        "fleet brake on rule temperature: 1 of 3 nodes within 600 s, 1 may go; "
        "`tidegate pardon temperature` lets it go on"
    ]
    found = status_of(story.loop.book, story.loop.view(), story.policy, "", story.clock.now_s())
    (finding,) = found["held_back"]
    assert (finding["gpu"], finding["rule"], finding["evidence"]) == (gpu(NODES[1], 1), "temperature", "79 °C")
    for subject in (gpu(NODES[1], 1), NODES[1], "temperature"):
        assert any(entry.kind == "brake" for entry in story.journal.about(subject)), subject


def test_a_person_lets_the_rule_go_on(story: Story) -> None:
    train(story)
    story.hot |= {gpu(node, 0) for node in NODES}
    story.tick(5)
    assert len(story.fleet.evicted) == 1
    story.loop.pardon("temperature", "the cooling unit is being repaired")
    story.tick(2)
    assert {move.gpu for move in story.fleet.evicted} == {gpu(node, 0) for node in NODES}
    assert story.loop.book.held_back == {}
    assert [entry.reason for entry in story.journal.about("temperature") if entry.kind == "unbrake"] == [
        "the cooling unit is being repaired"
    ]


def test_to_pardon_the_gpu_drops_its_finding(story: Story) -> None:
    story.hot |= {gpu(node, 0) for node in NODES[:2]}
    story.tick(3)
    assert kept(story.loop.book) == {NODES[1]}
    story.hot.discard(gpu(NODES[1], 0))
    story.loop.pardon(gpu(NODES[1], 0), "measured by hand")
    assert story.loop.book.held_back == {}


def test_a_persons_own_quarantine_is_never_braked(story: Story) -> None:
    for node in NODES:
        story.loop.quarantine(node, Tier.NONE, "rack moves")
    story.tick(3)
    assert out(story.loop.book) == set(NODES)
    story.hot.add(gpu(NODES[0], 0))
    story.tick(3)
    assert len(story.loop.book.quarantines) == 4, "a person's do not count against a rule"


def test_the_brake_survives_a_restart(tmp_path: Path) -> None:
    story = Story(fleet=FakeFleet(slots=dict.fromkeys(fleet(3), 2)))
    path = tmp_path / "journal.jsonl"

    def again() -> None:
        story.loop = ArbiterLoop(story.fleet, story.clock, FileJournal(path), story.policy, SpanBook())

    again()
    story.tick(5)
    story.hot |= {gpu(node, 0) for node in fleet(3)[:2]}
    story.tick(3)
    before = story.loop.book
    assert len(before.held_back) == 1
    again()
    assert story.loop.book == before
    story.tick(3)
    assert story.loop.book.held_back == before.held_back
    assert sum(entry.kind == "brake" for entry in story.loop.journal.about("temperature")) == 1, "it is said once"
