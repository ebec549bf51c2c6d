"""How long a step waits for a save of 2.06 GiB.

`over_memcpy`: our stall ÷ one copy of the state into memory that is warm. `over_best_peer`: our stall ÷ the least of
torch's `async_save` (by a thread; by a process; by a process out of reused shared memory, staged at once or beside the
step) and torchsnapshot's `async_take`, each in the round. Ours keeps its copy in memory as a checkpoint
besides. What steps cost while a save drains, `checkpoint_drain` tells.

Takes about 25 s for each contender and round.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from benchmarks.contract import Metric, compared, publish
from benchmarks.save_rounds import best, column, saves

PEERS = ("dcp_thread", "dcp_process", "dcp_process_shared", "dcp_process_shared_async", "torchsnapshot")


def metrics_of(found: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Metric]:
    ours = found["ours"]
    stall_s = column(ours, "stall_s")
    return {
        "over_memcpy": compared(stall_s, column(ours, "memcpy_s"), role="limit", ratio="ours / theirs", goal="<= 1.2"),
        "over_best_peer": compared(
            stall_s, best(found, PEERS, "stall_s"), role="peer", ratio="ours / theirs", goal="<= 0.5"
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="after one of warm-up")
    arguments = parser.parse_args()
    found = saves(("ours", *PEERS), arguments.rounds, "stall")
    publish("checkpoint_stall", metrics_of(found), rounds=arguments.rounds, packages=("tidegate", "torch"))


if __name__ == "__main__":
    main()
