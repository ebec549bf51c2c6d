"""A node's burn-in: what must be reached, who is measured with whom, and one node's part, really multiplied."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from tidegate.arbiter.messages import Check
from tidegate.examiner import ask_examiner
from tidegate.gang import fitness
from tidegate.health.burn_in import CPU, Burned, burn_node, group_checks, is_untouched, judged, write_record
from tidegate.health.burning import run_parts
from tidegate.health.marks import (
    Marks,
    Measure,
    Measured,
    against_marks,
    alike,
    first_pairs,
    marks_of,
    one_driver,
    second_pairs,
    suspects_of,
    temperatures,
)
from tidegate.ids import NodeId
from tidegate.spec.policy import HealthSpec, SourcesSpec
from tidegate.testing.fake_nvml import NvmlState, uuid_of

A, B, C, D = (NodeId(letter) for letter in "abcd")


def gemm(**tflops: float) -> list[Measured]:
    return [Measured(measure=Measure.GEMM, subject=gpu, value=value) for gpu, value in tflops.items()]


def failed(checks: list[Check]) -> list[tuple[str, str]]:
    return [(check.name, check.subject) for check in checks if not check.passed]


@pytest.mark.parametrize(("slow", "passes"), [(91.9, False), (92.0, True)])
def test_a_gpu_needs_092_of_the_median_of_its_model(slow: float, passes: bool) -> None:
    checks = against_marks(gemm(one=100, two=100, three=100, slow=slow), marks_of("NVIDIA H100 80GB HBM3"))
    assert (failed(checks) == []) is passes


def test_the_floor_holds_where_all_are_slow_alike_and_alone() -> None:
    slow = [Measured(measure=Measure.TO_DEVICE, subject=gpu, value=47.9) for gpu in ("one", "two")]
    assert len(failed(against_marks(slow, marks_of("NVIDIA H100 80GB HBM3")))) == 2
    assert failed(against_marks(slow[:1], marks_of("a GPU that nobody knows"))) == []


def test_bits_that_differ_are_the_minoritys_fault_and_without_a_majority_everybodys() -> None:
    assert failed(alike({"one": "x", "two": "x", "three": "y"})) == [("bits", "three")]
    assert len(failed(alike({"one": "x", "two": "y"}))) == 2
    assert failed(alike({"one": "x"})) == []


@pytest.mark.parametrize(("celsius", "passes"), [(78, True), (79, False)])
def test_hot_at_the_end(celsius: float, passes: bool) -> None:
    after = {"one": 75.0, "two": 75.0, "hot": celsius}
    assert (failed(temperatures({}, after, Marks())) == []) is passes


def test_ten_degrees_above_its_node_is_hot_too() -> None:
    assert failed(temperatures({}, {"one": 50.0, "two": 50.0, "hot": 61.0}, Marks())) == [("temperature", "hot")]


def test_suspects_of_the_first_round_are_tried_with_good_ones() -> None:
    pairs = first_pairs([A, B, C, D])
    assert pairs == [(A, B), (C, D)]
    assert first_pairs([A, B, C]) == [(A, B), (C, A)]
    assert first_pairs([A]) == []
    suspects = suspects_of({(A, B): True, (C, D): False})
    assert suspects == [C, D]
    assert second_pairs(suspects, [A, B]) == [(C, A), (D, B)]
    assert suspects_of({(A, B): True, (C, D): False, (C, A): True, (D, B): False}) == [D]
    assert second_pairs([A, B], []) == [], "where none is good nobody can be cleared"


def test_who_was_in_a_failed_pair_and_in_a_good_one_is_no_suspect() -> None:
    assert suspects_of({(A, B): True, (C, A): False}) == [C]


# One node, for real


@pytest.fixture
def spec(library: Path, tmp_path: Path, state: NvmlState) -> HealthSpec:
    """Four H100s by the state file, of which torch sees none: the products are the CPU's."""
    state.set_system("count", 2)
    sources = SourcesSpec(disks=(str(tmp_path),))
    return HealthSpec(nvml_library=str(library), state_dir=str(tmp_path / "health"), sources=sources)


def test_a_good_node_passes_and_is_signed_off(spec: HealthSpec, node: NodeId, tmp_path: Path) -> None:
    burned = burn_node(spec, node, 2, deadline_s=60.0)
    checks = judged([burned])[node]
    assert failed(checks) == []
    assert (burned.model, len(burned.gpus)) == (CPU, 2)
    assert {one.measure for one in burned.measured} == {
        Measure.GEMM,
        Measure.TO_DEVICE,
        Measure.TO_HOST,
        Measure.IN_NODE,
    }
    assert len(set(burned.sums.values())) == 1, "the same seeded products, the same bits"
    path = write_record(tmp_path / "burn-in", "node-a", burned, checks, signed_by="somebody", at_s=1000.0)
    record = json.loads(path.read_text())
    assert record["passed"]
    assert record["signed_off"] == {"by": "somebody", "at_s": 1000.0}
    assert is_untouched(record)
    assert not is_untouched({**record, "passed": False})


@pytest.mark.parametrize(
    ("key", "value", "name"),
    [
        ("rows", "0,0,1,0", "rule row_remap_pending"),
        ("field.230.0", "1", "rule recovery_now"),
        ("temp", "79", "rule temperature"),
        ("error", "15", "rule gpu_lost"),
        ("mig", "1", "MIG mode"),
        ("ecc_mode", "0", "ECC"),
    ],
)
def test_what_is_bad_already_ends_it_before_anything_is_multiplied(
    spec: HealthSpec, node: NodeId, state: NvmlState, key: str, value: str, name: str
) -> None:
    state.set(1, key, value)
    burned = burn_node(spec, node, 2, deadline_s=60.0)
    assert burned.measured == ()
    found = dict(failed(list(burned.checks)))
    assert name in found
    if key != "error":  # a GPU that was lost before it told its name has none
        assert found[name] == uuid_of("node-a", 1)


def test_a_gpu_that_is_missing_fails_the_inventory(spec: HealthSpec, node: NodeId) -> None:
    declared = spec.model_copy(update={"gpus_per_node": 8})
    assert ("inventory", node) in failed(list(burn_node(declared, node, 2, deadline_s=60.0).checks))


def test_of_the_others_nothing_is_said_and_one_that_is_not_there_fails(
    spec: HealthSpec, node: NodeId, state: NvmlState
) -> None:
    """A gang has its own GPUs examined, and what is out already is no fault of theirs nor of their node."""
    state.set(1, "temp", 79)
    mine, absent = uuid_of("node-a", 0), "GPU-of-another-node"
    burned = burn_node(spec, node, 1, deadline_s=60.0, only=[mine])
    assert failed(list(burned.checks)) == []
    assert (burned.gpus, set(burned.sums)) == ((mine,), {mine})
    assert failed(list(burn_node(spec, node, 1, deadline_s=60.0, only=[mine, absent]).checks)) == [
        ("inventory", absent)
    ]


def test_what_a_gang_asks_for_is_understood_burned_and_judged(spec: HealthSpec, node: NodeId, state: NvmlState) -> None:
    """Its coordinator and the examiner meet by JSON alone."""
    state.set(1, "ecc_mode", "0")
    mine = (uuid_of("node-a", 0), uuid_of("node-a", 1))
    told = {"do": "burn", "spec": spec.model_dump_json(), "node": node, "slots": 2, "only": mine}
    burned = ask_examiner(json.dumps(told), 60.0).said
    judged_too = ask_examiner(json.dumps({"do": "judge", "burned": [burned]}), 60.0).said
    checks = TypeAdapter(dict[NodeId, list[Check]]).validate_python(judged_too)
    [failure] = fitness.failures({node: mine}, checks)
    assert (failure.gpu, failure.reason) == (mine[1], f"ECC of {mine[1]}: off")


def test_a_part_that_hangs_or_dies_is_a_failed_check(tmp_path: Path) -> None:
    waits = {"part": "group", "rank": 0, "size": 2, "address": "127.0.0.1", "port": 1, "marks": {}, "timeout_s": 600}
    dies = {"part": "group", "rank": 1, "marks": {}}
    hung, dead = run_parts([{**waits, "rank": 1}, dies], [os.environ, {}], 0.2)
    assert hung == {"failed": "no end within 0.2 s"}
    assert "failed" in dead
    [check] = group_checks("sum", "pair", [hung, {"right": True, "busbw_gbytes_per_s": 1.0}])
    assert not check.passed
    assert failed(group_checks("sum", "pair", [{"right": False, "busbw_gbytes_per_s": 1.0}])) == [("sum", "pair")]


def test_nodes_are_compared_with_each_other() -> None:
    def burned(node: NodeId, tflops: float, text: str) -> Burned:
        rows = (Measured(measure=Measure.GEMM, subject="GPU-0", value=tflops),)
        return Burned(
            node=node,
            model="NVIDIA H100",
            driver="580.1",
            gpus=("GPU-0",),
            checks=(),
            measured=rows,
            sums={"GPU-0": text},
            took_s=1.0,
        )

    checks = judged([burned(A, 700, "x"), burned(B, 700, "x"), burned(C, 500, "x"), burned(D, 700, "y")])
    assert {node: failed(rows) for node, rows in checks.items()} == {
        A: [],
        B: [],
        C: [(Measure.GEMM, "GPU-0")],
        D: [("bits", "GPU-0")],
    }


def test_drivers_are_compared_within_a_model() -> None:
    def burned(node: NodeId, model: str, driver: str) -> Burned:
        return Burned(node=node, model=model, driver=driver, gpus=("G",), checks=(), measured=(), sums={}, took_s=1.0)

    checks = judged([burned(A, "H100", "580.1"), burned(B, "H100", "580.1"), burned(C, "A100", "550.9")])
    assert [failed(rows) for rows in checks.values()] == [[], [], []]
    checks = judged([burned(A, "H100", "580.1"), burned(B, "H100", "580.1"), burned(C, "H100", "550.9")])
    assert failed(checks[C]) == [("one driver", C)]


def test_one_gang_has_one_driver() -> None:
    """The odd one out fails, and of as many each the older ones: whoever is upgraded node by node goes forward."""
    assert failed(one_driver({A: "580.65.06", B: "580.9.1", C: "580.65.06"})) == [("one driver", B)]
    assert failed(one_driver({A: "580.65.06", B: "580.9.1"})) == [("one driver", B)]
    assert one_driver({A: "580.65.06"}) == []
