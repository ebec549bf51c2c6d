"""What a node must reach before it is signed off, and who is measured with whom (specification 5). Pure.

Fixed floors rot with drivers and models, so each measurement is also compared with the others' of the same model.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from tidegate.arbiter.messages import Check
from tidegate.ids import NodeId


class Measure(StrEnum):
    """What is measured on a GPU, in a node, or between two nodes; the unit is in the name."""

    GEMM = "gemm_tflops"
    TO_DEVICE = "host_to_device_gbytes_per_s"
    TO_HOST = "device_to_host_gbytes_per_s"
    PEER = "peer_copy_gbytes_per_s"
    IN_NODE = "all_reduce_in_node_gbytes_per_s"
    """busbw = algbw × 2 (n - 1) / n, as nccl-tests have it."""
    PAIR = "all_reduce_of_pair_gbytes_per_s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """Of one model of GPU."""

    floors: Mapping[Measure, float] = field(default_factory=dict)
    shares: Mapping[Measure, float] = field(default_factory=dict)
    """Of the median of all that were measured in the same way."""
    gemm_side: int = 8192
    gemm_s: float = 20.0
    copy_bytes: int = 2**30
    reduce_bytes: int = 2**30
    hottest_celsius: float = 78.0
    spread_celsius: float = 10.0
    """Above the node's median at the end of the products."""


_SHARES = MappingProxyType(
    {
        Measure.GEMM: 0.92,
        Measure.TO_DEVICE: 0.9,
        Measure.TO_HOST: 0.9,
        Measure.PEER: 0.9,
        Measure.IN_NODE: 0.9,
        Measure.PAIR: 0.8,
    }
)
# Azure's floors (azurehpc-health-checks) for H100 and A100 by the specification; on a CPU nothing is promised, and what
# shares the machine's cores is uneven by nature: there the flow is tested, not the bandwidth.
MARKS: Mapping[str, Marks] = MappingProxyType(
    {
        "H200": Marks(floors={Measure.TO_DEVICE: 48.0, Measure.IN_NODE: 480.0, Measure.PAIR: 100.0}, shares=_SHARES),
        "H100": Marks(
            floors={Measure.TO_DEVICE: 48.0, Measure.PEER: 300.0, Measure.IN_NODE: 460.0, Measure.PAIR: 100.0},
            shares=_SHARES,
        ),
        "A100": Marks(floors={Measure.TO_DEVICE: 20.0, Measure.IN_NODE: 228.0}, shares=_SHARES),
        "cpu": Marks(
            shares=dict.fromkeys(_SHARES, 0.02), gemm_side=192, gemm_s=0.1, copy_bytes=2**20, reduce_bytes=2**18
        ),
        "": Marks(shares=_SHARES),
    }
)
"""By a part of the model's name; the empty one is for all others."""


def marks_of(model: str) -> Marks:
    return next(marks for part, marks in MARKS.items() if part in model)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    measure: Measure
    subject: str
    value: float


def against_marks(measured: Sequence[Measured], marks: Marks) -> list[Check]:
    """Each against its floor, and against the median of the others of its kind where there are any."""
    checks = []
    for measure in Measure:
        ours = [one for one in measured if one.measure is measure]
        median = statistics.median(one.value for one in ours) if len(ours) > 1 else None
        for one in ours:
            floor = marks.floors.get(measure, 0.0)
            share = 0.0 if median is None else marks.shares.get(measure, 0.0) * median
            least = max(floor, share)
            why = "its floor" if floor >= share else f"{marks.shares[measure]:g} of the median {median:.4g}"
            text = f"{one.value:.4g}, at least {least:.4g} ({why})" if least else f"{one.value:.4g}, no mark"
            checks.append(Check(name=measure, subject=one.subject, passed=one.value >= least, text=text))
    return checks


def alike(sums: Mapping[str, str]) -> list[Check]:
    """The same seeded products on each GPU of a model must give the same bits: whoever differs from most is wrong.

    `sums`: by GPU. Where no value has a majority, nobody passes: one of them computes wrong, and nobody knows which.
    """
    if not sums:
        return []
    common = statistics.mode(sorted(sums.values()))
    agreed = sum(one == common for one in sums.values())
    if 2 * agreed <= len(sums) and len(sums) > 1:
        text = f"{len(set(sums.values()))} different results among {len(sums)} GPUs, none of most"
        return [Check(name="bits", subject=gpu, passed=False, text=text) for gpu in sums]
    return [
        Check(name="bits", subject=gpu, passed=one == common, text=f"{one[:12]}, most have {common[:12]}")
        for gpu, one in sums.items()
    ]


def one_driver(drivers: Mapping[NodeId, str]) -> list[Check]:
    """One gang, one driver: NCCL and its kernels are tested against one version at a time. That of most nodes is the
    right one; of as many, the newest."""
    if len(drivers) < 2:
        return []
    counts = Counter(drivers.values())
    most = max(counts, key=lambda version: (counts[version], _ordered(version)))
    return [
        Check(
            name="one driver",
            subject=node,
            passed=version == most,
            text=f"{version}; install {most}, as most nodes have",
        )
        for node, version in drivers.items()
    ]


def _ordered(version: str) -> tuple[int, ...]:
    return tuple(int(part) if part.isdigit() else 0 for part in version.split("."))


def temperatures(idle: Mapping[str, float], after: Mapping[str, float], marks: Marks) -> list[Check]:
    """`after`: at the end of the products, °C by GPU; a GPU without a reading has no line (missing is not healthy: the
    inventory says so)."""
    checks = []
    middle = statistics.median(after.values()) if after else 0.0
    for gpu, celsius in after.items():
        most = min(marks.hottest_celsius, middle + marks.spread_celsius)
        text = (
            f"{idle.get(gpu, celsius):g} °C idle, {celsius:g} °C at the end, at most {most:g} (node median {middle:g})"
        )
        checks.append(Check(name="temperature", subject=gpu, passed=celsius <= most, text=text))
    return checks


Pair = tuple[NodeId, NodeId]


def first_pairs(nodes: Sequence[NodeId]) -> list[Pair]:
    """Each with its neighbour; an odd one out with the first."""
    pairs = [(nodes[place], nodes[place + 1]) for place in range(0, len(nodes) - 1, 2)]
    return [*pairs, (nodes[-1], nodes[0])] if len(nodes) % 2 and len(nodes) > 1 else pairs


def suspects_of(results: Mapping[Pair, bool]) -> list[NodeId]:
    """All that were in a pair that failed and in none that passed."""
    good = {node for pair, passed in results.items() if passed for node in pair}
    return sorted({node for pair, passed in results.items() if not passed for node in pair} - good)


def second_pairs(suspects: Sequence[NodeId], good: Sequence[NodeId]) -> list[Pair]:
    """Each suspect with a node that is known to be good, in turn; with none of those nobody can be cleared."""
    return [(suspect, good[place % len(good)]) for place, suspect in enumerate(suspects)] if good else []
