"""Whom a gang has examined before it starts, and what it tells of those that fail."""

from __future__ import annotations

from tidegate.arbiter.messages import Check, Grant, GrantedNode
from tidegate.examiner import Answer, ask_examiner
from tidegate.gang.fitness import due, failures, out, passed
from tidegate.ids import ClaimId, Generation, GpuId, NodeId

A, B = NodeId("node-a"), NodeId("node-b")
A0, A1, B0, B1 = (GpuId(name) for name in ("GPU-a0", "GPU-a1", "GPU-b0", "GPU-b1"))
ASKED = {A: (A0, A1), B: (B0, B1)}
GRANT = Grant(
    claim=ClaimId("run"),
    generation=Generation(1),
    placement_group="group",
    gpus_per_node=2,
    nodes=tuple(GrantedNode(node=node, address="10.0.0.1", gpus=gpus) for node, gpus in ASKED.items()),
)


def check(subject: str, *, good: bool = False, name: str = "bits") -> Check:
    return Check(name=name, subject=subject, passed=good, text="as found")


def test_all_nodes_are_due_once_and_a_new_one_alone() -> None:
    assert due(GRANT, evicted=(), settled=()) == ASKED
    assert due(GRANT, evicted=(), settled=(A0, A1, B0, B1)) == {}
    assert due(GRANT, evicted=(), settled=(A0, A1)) == {B: (B0, B1)}


def test_what_is_out_is_not_examined_and_a_new_gpu_is_with_its_neighbours() -> None:
    assert due(GRANT, evicted=(A1, B0, B1), settled=()) == {A: (A0,)}
    assert due(GRANT, evicted=(A1,), settled=(A0, B0)) == {B: (B0, B1)}


def test_a_gpu_is_blamed_before_its_node() -> None:
    checks = {
        A: [check(A1), check(A1, name="ECC"), check("the node", name="sum in the node")],
        B: [check(B0, good=True)],
    }
    (failure,) = failures(ASKED, checks)
    assert (failure.node, failure.gpu, failure.subject) == (A, A1, A1)
    assert failure.reason == "bits of GPU-a1: as found; ECC of GPU-a1: as found"
    assert out(ASKED, [failure]) == {A1}


def test_where_no_gpu_is_to_blame_the_node_goes() -> None:
    failed = failures(ASKED, {A: [check(A0, good=True), check("the node")], B: []})
    assert [(failure.subject, failure.gpu) for failure in failed] == [(A, None)]
    assert out(ASKED, failed) == {A0, A1}


def test_the_neighbours_of_what_failed_have_not_passed() -> None:
    """Its node's burn-in ended there: they are examined again without it."""
    checks = {A: [check(A0), check(A1, good=True)], B: [check(B0, good=True), check(B1, good=True)]}
    assert passed(ASKED, checks) == {B0, B1}
    assert due(GRANT, evicted=(A0,), settled={*passed(ASKED, checks), A0}) == {A: (A1,)}


def test_a_node_that_was_not_examined_has_neither_passed_nor_failed() -> None:
    assert passed(ASKED, {B: [check(B0, good=True)]}) == {B0, B1}
    assert failures(ASKED, {B: [check(B0, good=True)]}) == ()


def test_the_examiner_answers_and_an_error_of_its_own_is_no_finding() -> None:
    assert ask_examiner('{"do": "judge", "burned": []}', 60.0).said == {}
    broken = ask_examiner('{"do": "burn"}', 60.0)
    assert broken.said is None
    assert broken.late is None
    assert "KeyError" in (broken.error or "")
    assert ask_examiner("{}", 0.01) == Answer(late="no end within 0.01 s")
