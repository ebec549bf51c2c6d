"""What steps cost while a save of 2.06 GiB drains to disk.

`step_while_saving`: 1 + what steps took longer while it drained, per second of draining. `over_raw_writes`: that ÷ the
same of as many raw bytes, written by direct I/O in a thread beside the steps as fast as the disk takes them, in the
round: what the machine itself takes for it. While nobody waits for a save, ours leaves the disk alone for a part of the
time, and takes longer for it; `checkpoint_save` measures saves that are waited for.

Takes about 45 s for each of the two and round.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence

from benchmarks.contract import Metric, compared, figure, publish
from benchmarks.save_rounds import column, saves


def metrics_of(found: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Metric]:
    ours, raw = found["ours"], found["raw_beside"]
    took_s, raw_s = (statistics.median(column(one, "drained_s")) for one in (ours, raw))
    note = f"drained in {took_s:.1f} s, the raw writes in {raw_s:.1f} s"
    slowdowns = column(ours, "slowdown")
    return {
        "step_while_saving": figure(slowdowns, goal="<= 1.10", note=note),
        "over_raw_writes": compared(
            slowdowns, column(raw, "slowdown"), role="limit", ratio="ours / theirs", goal="<= 1.05"
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="after one of warm-up")
    arguments = parser.parse_args()
    found = saves(("ours", "raw_beside"), arguments.rounds, "stall")
    publish("checkpoint_drain", metrics_of(found), rounds=arguments.rounds, packages=("tidegate", "torch"))


if __name__ == "__main__":
    main()
