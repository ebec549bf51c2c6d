"""How fast a save of 2.06 GiB becomes durable, from its start to its commit, in GB/s.

`of_raw`: ours ÷ direct writes of as many bytes in four streams, with nothing else to do, into the same directory.
`over_dcp_default`: ours ÷ `dcp.save` as it comes. `over_safetensors`: ours ÷ `save_file` and a sync. Ours copies the
state aside first, and hashes it.

Takes about 12 s for each contender and round.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from benchmarks.contract import Metric, compared, publish
from benchmarks.save_rounds import gigabytes_a_second, saves

CONTENDERS = ("ours", "raw", "dcp_default", "safetensors")


def metrics_of(found: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Metric]:
    speeds = {name: gigabytes_a_second(rounds, "durable_s") for name, rounds in found.items()}
    ours = speeds["ours"]
    return {
        "of_raw": compared(ours, speeds["raw"], role="limit", ratio="ours / theirs", goal=">= 0.9"),
        "over_dcp_default": compared(ours, speeds["dcp_default"], role="peer", ratio="ours / theirs", goal=">= 2"),
        "over_safetensors": compared(ours, speeds["safetensors"], role="peer", ratio="ours / theirs", goal=">= 1"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="after one of warm-up")
    arguments = parser.parse_args()
    found = saves(CONTENDERS, arguments.rounds, "durable")
    packages = ("tidegate", "torch", "safetensors")
    publish("checkpoint_save", metrics_of(found), rounds=arguments.rounds, packages=packages)


if __name__ == "__main__":
    main()
