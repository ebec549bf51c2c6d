"""Time and memory of one `decide`, from 1,000 nodes to 12,500 (100,000 GPUs), and how they grow.

Pools on every node, claims in every state, quarantines (see `big_fleet`). Two ticks: a quiet one, in which a claim that
cannot be had yet waits at the head of the queue, and one that places a claim for three tenths of all GPUs. Each call
gets a view that nothing was derived from yet, as each look of the arbiter does.

The floor is a bare pass over the same nodes and their pools, in the same rounds: a fleet that has outgrown the
processor's caches costs more for each node whatever is done with it, so even the pass grows faster than the nodes.

Takes about half a minute on one core.
"""

from __future__ import annotations

import argparse
import statistics
import time
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from benchmarks.big_fleet import GPUS_PER_NODE, NOW_S, POLICY, Fleet, build
from benchmarks.contract import Metric, compared, figure, growth_exponent, publish

from tidegate.arbiter.book import Book
from tidegate.arbiter.decide import Decision, decide
from tidegate.ids import pool_name

SIZES = (1_000, 2_000, 4_000, 8_000, 12_500)
CALLS = 5
MIB = 1 << 20

TICKS: Mapping[str, Callable[[Fleet], Book]] = {"quiet": lambda fleet: fleet.book, "placing": Fleet.asked}


@dataclass(slots=True)
class Measured:
    """Of one tick: a figure for each round."""

    seconds_at_top: list[float] = field(default_factory=list)
    exponents: list[float] = field(default_factory=list)
    peak_mib: list[float] = field(default_factory=list)


def seconds(fleet: Fleet, tick: str) -> float:
    """Median of `CALLS` decisions."""
    took_s = []
    for _ in range(CALLS):
        book, view = TICKS[tick](fleet), fleet.look()
        began_s = time.perf_counter()
        decision = decide(book, view, POLICY, NOW_S)
        took_s.append(time.perf_counter() - began_s)
        check(fleet, tick, decision)
    return statistics.median(took_s)


def pass_seconds(fleet: Fleet) -> float:
    """Median of `CALLS` passes: each node and its pool are found and looked at, once."""
    took_s = []
    for _ in range(CALLS):
        view = fleet.look()
        began_s = time.perf_counter()
        running = sum(view.pools[pool_name(node)].running + seen.gpu_slots for node, seen in view.nodes.items())
        took_s.append(time.perf_counter() - began_s)
        assert running > 0
    return statistics.median(took_s)


def peak_bytes(fleet: Fleet, tick: str) -> int:
    """The most that one decision has allocated at a time, its answer included."""
    book, view = TICKS[tick](fleet), fleet.look()
    tracemalloc.start()
    decision = decide(book, view, POLICY, NOW_S)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    check(fleet, tick, decision)
    return peak


def check(fleet: Fleet, tick: str, decision: Decision) -> None:
    """A decision that was not the one meant says nothing about its speed.

    Raises:
        RuntimeError: it was another one.
    """
    placed = [len(move.nodes) for move in decision.moves if move.kind == "create_group"]
    wanted = [] if tick == "quiet" else [-(-fleet.big.max_gpus // GPUS_PER_NODE)]
    if placed != wanted or bool(decision.moves) != bool(wanted):
        raise RuntimeError(f"the {tick} tick placed {placed} nodes, meant were {wanted}: {decision.reason[:500]}")


def measure(rounds: int, sizes: tuple[int, ...]) -> tuple[dict[str, Measured], list[float]]:
    """What each tick took, and the growth exponents of the bare pass."""
    fleets = [build(size) for size in sizes]
    measured = {tick: Measured() for tick in TICKS}
    passes: list[float] = []
    for number in range(rounds + 1):
        for tick, found in measured.items():
            took_s = [seconds(fleet, tick) for fleet in fleets]
            peak = peak_bytes(fleets[-1], tick) / MIB
            exponent = growth_exponent(sizes, took_s)
            shown = ", ".join(f"{size}: {one * 1000:.1f} ms" for size, one in zip(sizes, took_s, strict=True))
            print(f"round {number or 'warm-up'}, {tick}: {shown}; ^{exponent:.2f}, {peak:.1f} MiB", flush=True)
            if number:
                found.seconds_at_top.append(took_s[-1])
                found.exponents.append(exponent)
                found.peak_mib.append(peak)
        exponent = growth_exponent(sizes, [pass_seconds(fleet) for fleet in fleets])
        print(f"round {number or 'warm-up'}, bare pass: ^{exponent:.2f}", flush=True)
        if number:
            passes.append(exponent)
    return measured, passes


def metrics_of(measured: Mapping[str, Measured], passes: list[float]) -> dict[str, Metric]:
    """The placing tick gives the names that the contract asks for: it does everything that the quiet one does."""
    metrics = {}
    for tick, prefix in (("placing", ""), ("quiet", "quiet_")):
        found = measured[tick]
        metrics[f"{prefix}seconds_at_100k"] = figure(found.seconds_at_top, goal="<= 0.020")
        metrics[f"{prefix}growth_exponent"] = figure(found.exponents, goal="<= 1.1")
        metrics[f"{prefix}growth_over_pass"] = compared(
            found.exponents, passes, role="limit", ratio="ours / theirs", goal="<= 1.0"
        )
        metrics[f"{prefix}peak_mib_at_100k"] = figure(found.peak_mib, goal="<= 64")
    return metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="after one of warm-up")
    arguments = parser.parse_args()
    publish("decide", metrics_of(*measure(arguments.rounds, SIZES)), rounds=arguments.rounds, packages=("tidegate",))


if __name__ == "__main__":
    main()
