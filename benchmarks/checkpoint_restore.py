"""How fast 2.06 GiB are restored, every block checked against its hash, in GB/s.

`disk_of_raw`: ours from disk ÷ direct reads of the same file in four streams. `ram_of_memcpy`: ours from a copy in
shared memory ÷ one copy into memory that is warm. `over_dcp`: ours from disk ÷ `dcp.load` of the same state, which
checks nothing. Nothing read is in the page cache.

Takes about 20 s a round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.contract import Metric, compared, publish
from benchmarks.save_rounds import FOLDER_VARIABLE, gigabytes_a_second, last_line


def measure(rounds: int) -> list[dict[str, float]]:
    found = []
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-", dir=os.environ.get(FOLDER_VARIABLE)) as name:
        for number in range(0 if rounds > 1 else 1, rounds + 1):
            folder = Path(name) / str(number)
            took = last_line("benchmarks.contenders.loads", ("--folder", str(folder)))
            shown = ", ".join(f"{key} {value:.3f}" for key, value in took.items() if key != "bytes")
            print(f"round {number or 'warm-up'}: {shown}", flush=True)
            if number:
                found.append(took)
    return found


def metrics_of(found: Sequence[Mapping[str, float]]) -> dict[str, Metric]:
    names = ("disk_s", "memory_s", "dcp_s", "raw_s", "memcpy_s")
    disk, memory, dcp, raw, memcpy = (gigabytes_a_second(found, name) for name in names)
    over_dcp = compared(disk, dcp, role="peer", ratio="ours / theirs", goal=">= 4")
    at_most = statistics.median(limit / peer for limit, peer in zip(raw, dcp, strict=True))
    note = f"direct reads of the same bytes, unchecked, are {at_most:.2f} times as fast as the peer"
    return {
        "disk_of_raw": compared(disk, raw, role="limit", ratio="ours / theirs", goal=">= 0.9"),
        "ram_of_memcpy": compared(memory, memcpy, role="limit", ratio="ours / theirs", goal=">= 0.7"),
        "over_dcp": over_dcp.model_copy(update={"note": note}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="after one of warm-up")
    arguments = parser.parse_args()
    found = measure(arguments.rounds)
    publish("checkpoint_restore", metrics_of(found), rounds=arguments.rounds, packages=("tidegate", "torch"))


if __name__ == "__main__":
    main()
