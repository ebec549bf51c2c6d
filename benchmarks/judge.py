"""Time of one tick of `judge` for 12,500 nodes of 8 GPUs, on one core: can what a whole fleet said be replayed in time?

Each node's readings of one second are judged against its own history, as its agent does it: eight GPUs at one second's
signals each tick, a fifth of the nodes at five seconds' signals, a sixtieth at a minute's. All values are a busy GPU's,
with noise; counters stand still for most and rise for one in a thousand. Only `judge` is timed; the readings of 500
nodes at a time are made before. `with_ports` is one node whose nine InfiniBand ports are judged too, in each its worst
second, when everything is due.

Takes about a minute on one core.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.contract import figure, publish

from tidegate.health.history import History
from tidegate.health.judge import judge
from tidegate.health.readings import CEILINGS, COUNTERS, Reading, Signal, Status
from tidegate.ids import NodeId
from tidegate.spec.policy import HealthSpec

NODES, GPUS, CHUNK, PORTS = 12_500, 8, 500, 9
S = Signal
EACH_SECOND: Mapping[Signal, float] = {
    S.GPU_ANSWERS: 1.0, S.GPU_TEMPERATURE: 61.0, S.GPU_MARGIN: 26.0, S.GPU_CLOCK_REASONS: 4.0,
    S.GPU_POWER: 640.0, S.GPU_SM_CLOCK: 1.7e9, S.GPU_RECOVERY_ACTION: 0.0,
}  # fmt: skip
EACH_FIVE: Mapping[Signal, float] = {
    S.GPU_TENSOR_ACTIVE: 0.6, S.GPU_SM_ACTIVE: 0.9, S.GPU_UTILIZATION: 1.0, S.GPU_PROCESSES: 1.0,
    S.GPU_NVLINKS_DOWN: 0.0, S.GPU_NVLINK_REPLAYS: 3.0, S.GPU_NVLINK_RECOVERIES: 0.0, S.GPU_NVLINK_CRC: 7.0,
    S.GPU_PCIE_REPLAYS: 150.0, S.GPU_PCIE_FATAL: 0.0, S.GPU_THROTTLED_HW_THERMAL: 0.0,
    S.GPU_THROTTLED_SW_THERMAL: 2.0, S.GPU_THROTTLED_POWER_BRAKE: 0.0,
}  # fmt: skip
EACH_MINUTE: Mapping[Signal, float] = {
    S.GPU_ECC_CORRECTED: 12.0, S.GPU_ECC_UNCORRECTED: 0.0, S.GPU_ROW_PENDING: 0.0, S.GPU_ROW_FAILURE: 0.0,
    S.GPU_ROWS_UNCORRECTABLE: 0.0, S.GPU_FABRIC_STATE: 3.0, S.GPU_FABRIC_SUMMARY: 1.0, S.GPU_PCIE_GENERATION: 5.0,
    S.GPU_PCIE_GENERATION_MAX: 5.0, S.GPU_PCIE_WIDTH: 16.0, S.GPU_PCIE_WIDTH_MAX: 16.0,
}  # fmt: skip
NOISY = frozenset({S.GPU_TEMPERATURE, S.GPU_POWER, S.GPU_SM_CLOCK, S.GPU_TENSOR_ACTIVE})


def node_readings(index: int, at_s: float, dice: random.Random, *, all_due: bool = False) -> list[Reading]:
    """What the node with this number says in this second."""
    node = NodeId(f"{index:056x}")
    due = [EACH_SECOND]
    due += [EACH_FIVE] if all_due or (index + int(at_s)) % 5 == 0 else []
    due += [EACH_MINUTE] if all_due or (index + int(at_s)) % 60 == 0 else []
    readings = [Reading(at_s=at_s, node=node, subject=node, signal=S.NVML_ANSWERS, value=1.0, status=Status.OK)]
    for gpu in range(GPUS):
        subject = f"GPU-{index:08x}-{gpu}"
        for signals in due:
            for signal, value in signals.items():
                if signal in NOISY:
                    value *= 1 + 0.02 * (dice.random() - 0.5)
                elif signal in COUNTERS and dice.random() < 0.001:
                    value += at_s % 7
                readings.append(
                    Reading(at_s=at_s, node=node, subject=subject, signal=signal, value=value, status=Status.OK)
                )
    return readings


def port_readings(index: int, at_s: float) -> Iterator[Reading]:
    node = NodeId(f"{index:056x}")
    levels = {S.IB_PORT_PRESENT: 1.0, S.IB_PORT_ETHERNET: 0.0, S.IB_PORT_STATE: 4.0, S.IB_PORT_RATE: 400e9}
    counters = {signal: 3.0 for signal in COUNTERS if signal.startswith("ib_")}
    for port in range(PORTS):
        for signal, value in (levels | counters).items():
            yield Reading(
                at_s=at_s, node=node, subject=f"mlx5_{port}/1", signal=signal, value=value, status=Status.OK
            )  # fmt: skip


def ticks(count: int, nodes: int, seed: int) -> Iterator[tuple[float, int]]:
    """Seconds of each tick over all nodes, and its readings; the first, which has no history yet, is left out."""
    spec, dice = HealthSpec(), random.Random(seed)
    histories: Sequence[History] = [History()] * nodes
    for tick in range(count + 1):
        at_s, took_s, told, after = 1_000_000.0 + tick, 0.0, 0, []
        for start in range(0, nodes, CHUNK):
            said = [
                node_readings(index, at_s, dice, all_due=tick == 0) for index in range(start, min(start + CHUNK, nodes))
            ]
            told += sum(map(len, said))
            began_s = time.perf_counter()
            after += [judge(said[i], histories[start + i], spec, at_s).history for i in range(len(said))]
            took_s += time.perf_counter() - began_s
        histories = after
        if tick:
            yield took_s, told


def one_node_s(calls: int, ports: bool) -> float:
    """Seconds of one call when every signal is due."""
    spec, dice, history = HealthSpec(), random.Random(1), History()
    took_s = 0.0
    for call in range(calls + 1):
        at_s = 2_000_000.0 + call
        said = node_readings(1, at_s, dice, all_due=True) + (list(port_readings(1, at_s)) if ports else [])
        began_s = time.perf_counter()
        history = judge(said, history, spec, at_s).history
        took_s += time.perf_counter() - began_s if call else 0.0
    return took_s / calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="ticks of the whole fleet after the first (default 7)")
    parser.add_argument("--nodes", type=int, default=NODES)
    arguments = parser.parse_args()
    gc.collect()
    gc.freeze()
    # Each node's agent has a process of its own: looking through 12,500 histories for cycles is nobody's work.
    gc.disable()
    measured = list(ticks(arguments.rounds, arguments.nodes, seed=6))
    per_reading = [took_s / told * 1e9 for took_s, told in measured]
    alone = [one_node_s(100, ports=False) * 1e3 for _ in range(arguments.rounds)]
    with_ports = [one_node_s(100, ports=True) * 1e3 for _ in range(arguments.rounds)]
    publish(
        "judge",
        {
            "tick_12500_nodes_s": figure([took_s for took_s, _ in measured], goal="<= 1"),
            "reading_ns": figure(per_reading, goal="<= 1500"),
            "node_all_due_ms": figure(alone, goal="<= 2"),
            "node_all_due_with_ports_ms": figure(
                with_ports, goal="<= 2", note=f"{len(CEILINGS)} of a port's counters have a ceiling"
            ),
        },
        rounds=arguments.rounds,
        packages=("pydantic",),
        whole=arguments.nodes == NODES,
    )


if __name__ == "__main__":
    main()
