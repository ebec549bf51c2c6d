"""What a step costs more with everything on: ours, with heartbeat, snapshots, health agents and metrics, against the
same loop alone.

One rank on a node of one logical GPU, the digits' network and loop, and the other core for everything else, as a GPU
host has cores to spare. In each round every contender does the same steps; the pace is the time from one step's end to
another's 200 steps later, divided by their number, whatever came in between.

* ours: the submitted job under the whole control plane, with the digits' own snapshots and checkpoints;
* torchrun: the same loop, no checkpoints, the cluster idle beside it;
* Ray Train: the same loop in its worker, no checkpoints.

Takes about eight minutes on two cores.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections import defaultdict
from pathlib import Path

import ray
import yaml
from benchmarks.contenders import turns
from benchmarks.contract import Metric, compared, publish
from benchmarks.fault_to_step import make_images

from benchmarks import arena
from tidegate.cli.connect import connect
from tidegate.testing.local_cluster import LocalCluster

CONTENDERS = ("ours", "torchrun", "ray_train")
FIRST, LAST = 60, 260
"""Steps between which the pace is taken; those before are warm-up."""

Paces = dict[str, list[float]]
"""Contender -> seconds a step, one for each round."""


def make_inputs(folder: Path) -> turns.Inputs:
    config = yaml.safe_load((turns.ROOT / "jobs/configs/digits.yaml").read_text(encoding="utf-8"))
    config |= {"steps": 100_000}
    path, bare_path = folder / "digits.yaml", folder / "bare.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    bare_path.write_text(yaml.safe_dump(config | {"checkpoint": {"every_steps": 100_000}}), encoding="utf-8")
    return turns.Inputs(config=path, peers_config=bare_path, data=make_images(folder))


def pace_of(contender: str, inputs: turns.Inputs, run_dir: Path, cluster: LocalCluster) -> float:
    started = {
        "ours": lambda: turns.ours(inputs, run_dir, cluster, ranks=1),
        "torchrun": lambda: turns.torchrun(inputs, run_dir, cluster.client_environment(), undisturbed=False, ranks=1),
        "ray_train": lambda: turns.ray_train(inputs, run_dir, cluster, {}, ranks=1),
    }[contender]
    with started() as run:
        turns.wait_for_step(run, LAST)
    return turns.pace_s(run_dir, FIRST, LAST)


def measure(folder: Path, base_port: int, rounds: int) -> Paces:
    """All paces after one round of warm-up. Whoever begins a round is another each time."""
    inputs = make_inputs(folder)
    paces: Paces = defaultdict(list)
    environment = arena.fake_gpus(folder / "nvml", ("node-a",), 1)
    with arena.cluster(base_port, (1,), environment) as cluster:
        arena.start_control_plane(arena.write_policy(folder, serving={"protect": False}), cluster.address)
        connect(cluster.address)
        try:
            for number in range(rounds + 1):
                begins = number % len(CONTENDERS)
                for contender in itertools.islice(itertools.cycle(CONTENDERS), begins, begins + len(CONTENDERS)):
                    pace_s = pace_of(contender, inputs, folder / f"round {number} {contender}", cluster)
                    print(f"round {number}: {contender} {pace_s * 1000:.2f} ms a step", flush=True)
                    if number:
                        paces[contender].append(pace_s)
        finally:
            ray.shutdown()
    return paces


def metrics_of(paces: Paces) -> dict[str, Metric]:
    goals = {"torchrun": "<= 1.02", "ray_train": "<= 1.01"}
    return {
        f"step_over_{peer}": compared(paces["ours"], paces[peer], role="peer", ratio="ours / theirs", goal=goal)
        for peer, goal in goals.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="after one of warm-up")
    parser.add_argument("--base-port", type=int, default=7630, help="two ports from here on are used")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-") as folder:
        metrics = metrics_of(measure(Path(folder), arguments.base_port, arguments.rounds))
    publish("steady_tax", metrics, rounds=arguments.rounds, packages=("tidegate", "ray", "torch", "diffusers"))


if __name__ == "__main__":
    main()
