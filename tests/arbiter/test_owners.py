"""Every GPU-second has one owner, through a whole flip."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from story import NODES, Story, ask, gpu

from tidegate.arbiter.book import Book, apply
from tidegate.arbiter.messages import GangPhase, GangReport, Grant, GrantedNode
from tidegate.arbiter.moves import Advance, File, Give, Join
from tidegate.arbiter.owners import owners
from tidegate.arbiter.states import ClaimState
from tidegate.arbiter.view import NodeSeen, PoolSeen, View
from tidegate.ids import ClaimId, Generation, pool_name
from tidegate.telemetry.goodput import Owner, Span, SpanBook, fractions, gpu_seconds, read_spans, refine


def now(story: Story) -> Counter[str]:
    found = owners(story.loop.book, story.loop.view())
    assert len(found) == 6
    return Counter(str(owner) for owner in found.values())


def test_the_owners_of_a_flip() -> None:
    story = Story()
    story.tick(10)
    assert now(story) == {"serving_idle": 6}
    story.gateway_follows = False
    claim = story.file(ask())
    story.until(claim, ClaimState.DRAINING)
    assert now(story) == {"draining": 6}
    story.gateway_follows = True
    story.until(claim, ClaimState.GRANTED)
    story.tick()
    assert now(story) == {"forming": 6}
    for phase, owner in (
        (GangPhase.RUNNING, "productive"),
        (GangPhase.RESTARTING, "restarting"),
        (GangPhase.RECOMPUTING, "recomputed"),
    ):
        story.phases[claim] = phase
        story.tick(2)
        assert now(story) == {owner: 6}
    story.hot.add(gpu(NODES[0], 0))
    story.tick(5)
    assert now(story) == {"recomputed": 5, "quarantined": 1}
    story.phases[claim] = GangPhase.FINISHED
    story.until(claim, ClaimState.RETURNING)
    story.tick(3)
    coming = now(story)
    assert coming["free"] > 0, "GPUs that nobody has yet are not the gang's any more"
    assert coming["starting"] + coming["serving_idle"] > 0
    story.until(claim, ClaimState.DONE)
    story.tick()
    assert now(story) == {"serving_idle": 6}


def of_a_run(*states: ClaimState, phase: GangPhase, pool: PoolSeen | None = None, joins: bool = False) -> list[str]:
    """Owners of a node's two GPUs when a claim on it has come to the last of `states`."""
    node = NodeSeen(id=NODES[0], address="", gpu_slots=2, free_gpu_slots=2)
    other = NodeSeen(id=NODES[1], address="", gpu_slots=2, free_gpu_slots=2)
    claim = ClaimId("run")
    book = apply(Book(), File(claim=claim, spec=ask(), at_s=1.0))
    for state in states:
        first = (NODES[1],) if joins else (NODES[0],)
        nodes = first if state is ClaimState.DRAINING else None
        book = apply(book, Advance(claim=claim, to=state, reason="", at_s=2.0, nodes=nodes))
        if state is ClaimState.GRANTED:
            granted = tuple(GrantedNode(node=n, address="", gpus=()) for n in first)
            grant = Grant(claim=claim, generation=Generation(9), placement_group="g", gpus_per_node=2, nodes=granted)
            book = apply(book, Give(claim=claim, grant=grant))
    if joins:
        book = apply(book, Join(claim=claim, nodes=(NODES[0],), freed=False, reason="", at_s=3.0))
    report = GangReport(claim=claim, at_s=3.0, phase=phase, gang_generation=Generation(1), step=5, world_size=2)
    seen = View(
        nodes={node.id: node, other.id: other},
        pools={pool.name: pool} if pool is not None else {},
        groups={},
        gateways={},
        health={},
        gangs={claim: report},
    )
    found = owners(book, seen)
    return [str(owner) for gpu, owner in found.items() if gpu.startswith(NODES[0][:12])]


TO_RUNNING = (ClaimState.DRAINING, ClaimState.GRANTED, ClaimState.RUNNING)


def test_a_run_that_was_asked_to_leave_is_finishing() -> None:
    for phase in (GangPhase.RUNNING, GangPhase.FINISHING, GangPhase.LEFT):
        assert of_a_run(*TO_RUNNING, ClaimState.PREEMPTED, phase=phase) == ["finishing"] * 2


def test_a_gang_that_forms_again_restarts_and_serving_drains() -> None:
    again = (*TO_RUNNING, ClaimState.DRAINING)
    assert of_a_run(*again, phase=GangPhase.RESTARTING) == ["restarting"] * 2
    pool = PoolSeen(name=pool_name(NODES[0]), target=0, running=1, starting=0, stopping=0)
    assert of_a_run(*again, phase=GangPhase.RESTARTING, pool=pool) == ["draining", "restarting"]
    assert of_a_run(ClaimState.DRAINING, phase=GangPhase.FORMING) == ["draining"] * 2, "it never ran"


def test_a_node_that_is_freed_for_a_running_gang_waits_for_it() -> None:
    pool = PoolSeen(name=pool_name(NODES[0]), target=0, running=1, starting=0, stopping=0)
    assert of_a_run(*TO_RUNNING, phase=GangPhase.RUNNING, pool=pool, joins=True) == ["draining", "forming"]


def test_spans_add_up_to_all_gpu_seconds() -> None:
    spans = [
        Span(start_s=10.0, owners={"a": Owner.SERVING_IDLE, "b": Owner.SERVING_IDLE}),
        Span(start_s=14.0, owners={"a": Owner.PRODUCTIVE, "b": Owner.FREE}),
    ]
    total = gpu_seconds(spans, 12.0, 20.0)
    assert total[Owner.SERVING_IDLE] == 4.0
    assert (total[Owner.PRODUCTIVE], total[Owner.FREE]) == (6.0, 6.0)
    assert sum(total.values()) == 16.0
    finer = refine(total, serving_s=1.5, checkpoint_s=0.5)
    assert (finer[Owner.SERVING], finer[Owner.SERVING_IDLE]) == (1.5, 2.5)
    assert (finer[Owner.CHECKPOINT], finer[Owner.PRODUCTIVE]) == (0.5, 5.5)
    assert sum(finer.values()) == 16.0
    with pytest.raises(ValueError, match="no GPU-seconds"):
        fractions(gpu_seconds(spans, 1.0, 2.0))


@given(
    st.lists(st.tuples(st.floats(0, 100), st.lists(st.sampled_from(Owner), min_size=3, max_size=3)), min_size=1),
    st.floats(0, 1000),
    st.floats(0, 1000),
)
def test_fractions_add_to_one(rows: list[tuple[float, list[Owner]]], serving_s: float, checkpoint_s: float) -> None:
    ordered = sorted(rows, key=lambda row: row[0])
    spans = [Span(start_s=at_s, owners=dict(zip("abc", names, strict=True))) for at_s, names in ordered]
    total = gpu_seconds(spans, 0.0, 101.0)
    assert sum(total.values()) == pytest.approx(3 * (101.0 - ordered[0][0]))
    assert sum(fractions(refine(total, serving_s, checkpoint_s)).values()) == pytest.approx(1.0)


def test_a_line_is_written_only_when_something_changes(tmp_path: Path) -> None:
    path = tmp_path / "owners.jsonl"
    book = SpanBook(path)
    book.observe({"a": Owner.FREE}, 1.0)
    book.observe({"a": Owner.FREE}, 2.0)
    book.observe({"a": Owner.STARTING}, 3.0)
    with path.open("a") as file:
        file.write('{"start_s": 4.0, "own')
    assert [(span.start_s, dict(span.owners)) for span in read_spans(path)] == [
        (1.0, {"a": Owner.FREE}),
        (3.0, {"a": Owner.STARTING}),
    ]
