"""Seconds from a rank's SIGKILL to the first step of the restarted gang: ours, plain Ray Train's, and the floor.

Four ranks on two nodes of two logical GPUs; same network, data, checkpoints and loop for all. In each round every
contender starts a run, loses one rank after its first checkpoint, and is stopped after its first step:

* ours: the submitted job, with arbiter and health agents running;
* Ray Train at its defaults; polling its workers every 0.5 s; and so on a cluster of its own that preloads torch and the
  loop in its workers (`RAY_preload_python_modules`). The headline is against whichever has the best median;
* the floor: the same ranks forked from a warm forkserver, without a cluster: fork, rendezvous, restore, one step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import ray
import yaml
from benchmarks.contenders import turns
from benchmarks.contract import compared, publish
from PIL import Image

from tidegate.cli.connect import connect
from tidegate.cli.up import bring_up
from tidegate.data.prepare import prepare
from tidegate.testing import fake_nvml
from tidegate.testing.local_cluster import LocalCluster, Ports

NODES = ("node-a", "node-b")
GPUS_PER_NODE = turns.RANKS // len(NODES)
PEERS = ("default", "polled", "preloaded")
PRELOADED = "ray.train.torch,tidegate.train.loop"
POLLED = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5"}
FLOOR_GENERATION = 1000
"""Above any that a turn of ours reaches."""
IMAGES = 1024
EVERY_STEPS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Arena:
    """What turns are played in."""

    inputs: turns.Inputs
    plain: Mapping[str, str]
    """Environment of processes that talk to the cluster where the arbiter runs."""
    preloaded: Mapping[str, str]
    """As `plain`, of the cluster whose workers import torch and the loop as they start."""


# Each plays one turn in the round's folder and says how many seconds it took. The floor needs a checkpoint of ours.
CONTENDERS: Mapping[str, Callable[[Arena, Path, int], float]] = {
    "ours": lambda arena, here, victim: turns.ours(arena.inputs, here / "ours", victim, arena.plain),
    "floor": lambda arena, here, victim: turns.warm_fork(arena.inputs, here / "ours", FLOOR_GENERATION, arena.plain),
    "default": lambda arena, here, victim: turns.ray_train(arena.inputs, here / "default", victim, arena.plain),
    "polled": lambda arena, here, victim: turns.ray_train(
        arena.inputs, here / "polled", victim, {**arena.plain, **POLLED}
    ),
    "preloaded": lambda arena, here, victim: turns.ray_train(
        arena.inputs, here / "preloaded", victim, {**arena.preloaded, **POLLED}
    ),
}


def make_inputs(folder: Path) -> turns.Inputs:
    """Random images with captions, and the digits' config with steps enough for any turn."""
    images = folder / "images"
    images.mkdir()
    dice = np.random.default_rng(0)
    with (images / "metadata.jsonl").open("w", encoding="utf-8") as metadata:
        for number in range(IMAGES):
            name = f"{number:04d}.png"
            Image.fromarray(dice.integers(0, 256, (8, 8), dtype=np.uint8), mode="L").save(images / name)
            metadata.write(json.dumps({"file_name": name, "text": f"noise number {number % 10}"}) + "\n")
    prepare(images, folder / "shards", seed=0, rows_per_shard=IMAGES)
    config = yaml.safe_load((turns.ROOT / "jobs/configs/digits.yaml").read_text(encoding="utf-8"))
    config |= {"steps": 100_000, "checkpoint": {"every_steps": EVERY_STEPS, "keep": 3}}
    path = folder / "digits.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return turns.Inputs(config=path, data=folder / "shards")


def start_control_plane(folder: Path, address: str) -> None:
    policy = yaml.safe_load((turns.ROOT / "policy.yaml").read_text(encoding="utf-8"))
    policy["arbiter"]["state_dir"] = str(folder / "state")
    policy["health"] |= {"nvml_library": str(folder / "nvml" / fake_nvml.LIBRARY), "state_dir": str(folder / "health")}
    policy["serving"]["protect"] = False  # nothing is served here
    path = folder / "policy.yaml"
    path.write_text(yaml.safe_dump(policy), encoding="utf-8")
    for line in bring_up(path, address):
        print(line, flush=True)


def cluster(base_port: int, environment: Mapping[str, str], nvml: Path | None = None) -> LocalCluster:
    states = [] if nvml is None else [{fake_nvml.STATE_VARIABLE: str(nvml / f"{node}.state")} for node in NODES]
    return LocalCluster(
        ports=Ports(gcs=base_port, dashboard=base_port + 1),
        gpus_per_node=(GPUS_PER_NODE,) * len(NODES),
        # Ray keeps an idle worker for each CPU: more of them only cost memory here.
        head_cpus=2,
        node_cpus=4,
        environment={"PYTHONPATH": str(turns.ROOT), "OMP_NUM_THREADS": "1", **environment},
        node_environment=states,
    )


def measure(folder: Path, base_port: int, rounds: int) -> dict[str, list[float]]:
    """Contender -> seconds in each round, after one round of warm-up."""
    inputs = make_inputs(folder)
    fake_nvml.build(folder / "nvml")
    for node in NODES:
        fake_nvml.NvmlState(folder / "nvml" / f"{node}.state", fake_nvml.gpus_of(node, GPUS_PER_NODE))
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    with (
        cluster(base_port, {}, folder / "nvml") as plain,
        cluster(base_port + 2, {"RAY_preload_python_modules": PRELOADED}) as preloaded,
    ):
        start_control_plane(folder, plain.address)
        connect(plain.address)
        arena = Arena(inputs=inputs, plain=plain.client_environment(), preloaded=preloaded.client_environment())
        try:
            for number in range(rounds + 1):
                # Each rank has its turn to die: rank 0 is the rendezvous' host, the others are not.
                victim = (number + 1) % turns.RANKS
                for name, turn in CONTENDERS.items():
                    took_s = turn(arena, folder / f"round-{number}", victim)
                    print(f"round {number or 'warm-up'}, rank {victim}: {name} {took_s:.2f} s", flush=True)
                    if number:
                        seconds[name].append(took_s)
        finally:
            ray.shutdown()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="after one of warm-up")
    parser.add_argument("--base-port", type=int, default=7610, help="four ports from here on are used")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-") as folder:
        seconds = measure(Path(folder), arguments.base_port, arguments.rounds)
    best = min(PEERS, key=lambda name: statistics.median(seconds[name]))
    mine = seconds["ours"]
    metrics = {
        "rank_kill": compared(mine, seconds[best], role="peer", ratio="theirs / ours", goal=">= 5"),
        "rank_kill_over_default": compared(mine, seconds["default"], role="peer", ratio="theirs / ours", goal=">= 5"),
        "rank_kill_over_floor": compared(mine, seconds["floor"], role="limit", ratio="ours / theirs", goal="<= 2.0"),
    }
    publish("fault_to_step", metrics, rounds=arguments.rounds, packages=("tidegate", "ray", "torch", "diffusers"))


if __name__ == "__main__":
    main()
