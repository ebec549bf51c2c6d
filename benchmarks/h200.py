"""What one GPU makes of it, without Ray and without a cluster: for a machine that is lent for a quarter of an hour.

python -m benchmarks.h200           # on a GPU; under eight minutes on an H200
python -m benchmarks.h200 --tiny    # anywhere, in a minute: that it runs

* `step_over_written`: a step of the product's loop (220 M parameters, bfloat16, compiled by block, every check and
  record on) over one of a loop written by hand for one GPU, the whole network compiled;
* `mfu`: of the product's loop, by `tidegate.train.flops`;
* `stall_over_pinned_copy`: what a save of 2.06 GiB makes training wait, over one copy of the state into pinned memory;
* `step_while_copying`: a step beside which a save is copied and written, over one without;
* `nvml_read_s`: one reading of all signals of one GPU, tensor activity by GPM among them.

It needs the product's dependencies but for Ray.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from benchmarks.contenders.one_gpu import SIZES
from benchmarks.contract import Metric, compared, figure, publish
from benchmarks.loader import write_photos
from benchmarks.save_rounds import column, last_line

from tidegate.data.prepare import prepare

NAMES = ("loop", "written", "stall", "nvml")
IMAGES = 1024

Rounds = Mapping[str, Sequence[Mapping[str, float]]]


def measure(folder: Path, rounds: int, size: str, names: Sequence[str]) -> Rounds:
    """Each part once a round, in turn. The first is warm-up: it fills the compiler's cache."""
    write_photos(folder / "images", IMAGES, SIZES[size]["side"])
    data = folder / "data"
    prepare(folder / "images", data, seed=0, rows_per_shard=IMAGES)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for number in range(rounds + 1):
        for name in names:
            place = folder / f"{number}-{name}"
            place.mkdir()
            (place / "data").symlink_to(data)
            options = ("--part", name, "--folder", str(place), "--size", size)
            took = last_line("benchmarks.contenders.one_gpu", options)
            shown = ", ".join(f"{key} {value:.4g}" for key, value in took.items())
            print(f"round {number or 'warm-up'}: {name} {shown}", flush=True)
            if number:
                found[name].append(took)
    return found


def metrics_of(found: Rounds, gpu: str) -> dict[str, Metric]:
    ours, saves = found["loop"], found["stall"]
    whole_step_s = [row["step_s"] + row["input_s"] for row in ours]
    # At least 0.98 of the other's TFLOP/s: at most 1/0.98 of its time.
    metrics = {
        "step_over_written": compared(
            whole_step_s, column(found["written"], "step_s"), role="limit", ratio="ours / theirs", goal="<= 1.02"
        ),
        "tflops": figure(column(ours, "tflops"), goal=">= 1", note=gpu),
        "mfu": figure(column(ours, "mfu"), goal=">= 0.4", note=gpu),
        "stall_over_pinned_copy": compared(
            column(saves, "stall_s"), column(saves, "copy_s"), role="limit", ratio="ours / theirs", goal="<= 1.2"
        ),
        "step_while_copying": compared(
            column(saves, "saving_step_s"),
            column(saves, "idle_step_s"),
            role="limit",
            ratio="ours / theirs",
            goal="<= 1.10",
        ),
    }
    if "nvml" in found:
        # A quarter of a second is the health agent's budget for a GPU.
        metrics["nvml_read_s"] = figure(column(found["nvml"], "read_s"), goal="<= 0.25", note=gpu)
    return metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="after one of warm-up")
    parser.add_argument("--tiny", action="store_true", help="a network of no use, on whatever there is")
    parser.add_argument("--without-nvml", action="store_true", help="on a machine that has no such library")
    arguments = parser.parse_args()
    names = [name for name in NAMES if name != "nvml" or not arguments.without_nvml]
    if not (arguments.tiny or torch.cuda.is_available()):
        parser.error("torch sees no GPU here\nhint: --tiny runs anywhere")
    gpu = f"on {torch.cuda.get_device_name(0)}" if torch.cuda.is_available() else "on no GPU"
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-") as folder:
        found = measure(Path(folder), arguments.rounds, "tiny" if arguments.tiny else "full", names)
    whole = not arguments.tiny and "nvml" in found
    publish("h200", metrics_of(found, gpu), rounds=arguments.rounds, packages=("torch", "diffusers"), whole=whole)


if __name__ == "__main__":
    main()
