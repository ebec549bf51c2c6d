"""Seconds from a fault to the first step of the restarted gang: ours, plain Ray Train's, torchrun's, and the floor.

Four ranks on two of three nodes of two logical GPUs; same network, data, checkpoints and loop for all. In each round
every contender starts one run, which the faults strike one after the other, each after a checkpoint:

* `rank_kill`: SIGKILL to a rank. `rank_hang`: SIGSTOP to a rank. `node_kill`: SIGKILL to everything on a node, while
  the third is free. `controller_kill`: SIGKILL to Ray Train's controller.
* ours: the submitted job, with arbiter and health agents running;
* Ray Train, `tuned`: it looks at its workers every 0.5 s, and a collective gives up after `PEERS_TIMEOUT_S` (a start
  needs that long). At its `default` only for `rank_kill`: a hang costs it ten minutes there. Workers that preload torch
  (`RAY_preload_python_modules`) made it slower here. Without its controller its run fails;
* torchrun `--max-restarts`, on one host, with the same timeout, started anew for each fault. Sometimes its ranks keep
  missing each other at their rendezvous: where it isn't back in three minutes, it counts as three minutes;
* the floor: the same ranks forked from a warm forkserver, without a cluster: fork, rendezvous, restore, one step.

`loss_mismatches` counts our steps, those done again too, whose loss differs from an undisturbed run's; `steps_lost` is
the most that a restart did again.

Takes about twenty minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import ray
import yaml
from benchmarks.contenders import turns
from benchmarks.contract import Metric, compared, figure, publish
from PIL import Image

from benchmarks import arena
from tidegate.cli.connect import connect
from tidegate.data.prepare import prepare
from tidegate.testing.local_cluster import LocalCluster

NODES = ("node-a", "node-b", "node-c")
GPUS_PER_NODE = 2
FAULTS = ("rank_kill", "rank_hang", "node_kill", "controller_kill")
TUNED = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5"}
PEERS_TIMEOUT_S = 10.0
FLOOR_GENERATION = 1000
"""Above any that a turn of ours reaches."""
IMAGES = 1024
EVERY_STEPS = 10
NO_PEER = "plain Ray Train's run fails when its controller is killed"


@dataclass(slots=True)
class Found:
    seconds: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    """Fault and contender -> what each round took."""
    runs: list[Path] = field(default_factory=list)
    """Directories of all runs of ours."""
    survived: int = 0
    """Runs of plain Ray Train that outlived their controller."""
    mismatches: int = 0


def make_images(folder: Path) -> Path:
    """Shards of random images of the digits' size, with captions."""
    images = folder / "images"
    images.mkdir()
    dice = np.random.default_rng(0)
    with (images / "metadata.jsonl").open("w", encoding="utf-8") as metadata:
        for number in range(IMAGES):
            name = f"{number:04d}.png"
            Image.fromarray(dice.integers(0, 256, (8, 8), dtype=np.uint8), mode="L").save(images / name)
            metadata.write(json.dumps({"file_name": name, "text": f"noise number {number % 10}"}) + "\n")
    prepare(images, folder / "shards", seed=0, rows_per_shard=IMAGES)
    return folder / "shards"


def make_inputs(folder: Path) -> turns.Inputs:
    """The digits' config with steps enough for any turn, and images."""
    config = yaml.safe_load((turns.ROOT / "jobs/configs/digits.yaml").read_text(encoding="utf-8"))
    config |= {"steps": 100_000, "checkpoint": {"every_steps": EVERY_STEPS, "keep": 3}}
    path, peers_path = folder / "digits.yaml", folder / "peers.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    peers_path.write_text(yaml.safe_dump(config | {"timeout_s": PEERS_TIMEOUT_S}), encoding="utf-8")
    return turns.Inputs(config=path, peers_config=peers_path, data=make_images(folder))


def play(found: Found, inputs: turns.Inputs, cluster: LocalCluster, here: Path, victim: int, faults: list[str]) -> None:
    """One round: every contender once."""

    def struck(contender: str, fault: str, took_s: float) -> None:
        print(f"{here.name}, rank {victim}: {fault}: {contender} {took_s:.2f} s", flush=True)
        found.seconds[fault, contender].append(took_s)

    run_dir = here / "ours"
    with turns.ours(inputs, run_dir, cluster) as run:
        for fault in faults:
            struck("ours", fault, run.strike(fault, victim))
    found.runs.append(run_dir)
    turns.revive(cluster)
    with turns.ray_train(inputs, here / "tuned", cluster, TUNED) as run:
        for fault in faults:
            if fault == "controller_kill":
                found.survived += not run.fails_without_controller()
            else:
                struck("tuned", fault, run.strike(fault, victim))
    turns.revive(cluster)
    if "rank_kill" in faults:
        struck("floor", "rank_kill", turns.warm_fork(inputs, run_dir, FLOOR_GENERATION, cluster.client_environment()))
        with turns.ray_train(inputs, here / "default", cluster, {}) as run:
            struck("default", "rank_kill", run.strike("rank_kill", victim))
    for fault in (fault for fault in faults if fault.startswith("rank_")):
        # A run for each: one that is not back from a fault can't be struck by the next.
        run_dir = here / f"torchrun {fault}"
        with turns.torchrun(inputs, run_dir, cluster.client_environment(), undisturbed=False) as run:
            try:
                took_s = run.strike(fault, victim)
            except turns.NotBackError as error:
                print(f"{run_dir.name} is not back: {error}")
                took_s = turns.DEADLINE_S
            struck("torchrun", fault, took_s)


def count_mismatches(inputs: turns.Inputs, here: Path, runs: list[Path], environment: Mapping[str, str]) -> int:
    """Steps of our runs whose loss is not the one of a run that nothing struck."""
    done = [pair for run_dir in runs for pair in turns.losses(run_dir)]
    with turns.torchrun(inputs, here, environment, undisturbed=True) as run:
        turns.wait_for_step(run, max(step for step, _ in done))
    undisturbed = dict(turns.losses(here))
    return sum(undisturbed[step] != loss for step, loss in done)


def measure(folder: Path, base_port: int, rounds: int, faults: list[str]) -> Found:
    """What all turns took after one round of warm-up."""
    inputs = make_inputs(folder)
    environment = arena.fake_gpus(folder / "nvml", NODES, GPUS_PER_NODE)
    found = Found()
    with arena.cluster(base_port, (GPUS_PER_NODE,) * len(NODES), environment) as cluster:
        # Nothing is served here.
        arena.start_control_plane(arena.write_policy(folder, serving={"protect": False}), cluster.address)
        connect(cluster.address)
        try:
            for number in range(rounds + 1):
                # Each rank has its turn: rank 0 is the rendezvous' host, the others are not.
                victim = (number + 1) % turns.RANKS
                here = folder / (f"round {number}" if number else "warm-up")
                play(found, inputs, cluster, here, victim, faults)
                if number == 0:
                    found.seconds.clear()
            found.mismatches = count_mismatches(
                inputs, folder / "undisturbed", found.runs, cluster.client_environment()
            )
        finally:
            ray.shutdown()
    return found


def metrics_of(found: Found) -> dict[str, Metric]:
    seconds, metrics = found.seconds, {}

    def over(name: str, fault: str, theirs: str, goal: str) -> None:
        metrics[name] = compared(
            seconds[fault, "ours"], seconds[fault, theirs], role="peer", ratio="theirs / ours", goal=goal
        )

    if ("rank_kill", "ours") in seconds:
        best = min(("default", "tuned"), key=lambda name: statistics.median(seconds["rank_kill", name]))
        over("rank_kill", "rank_kill", best, ">= 10")
        over("rank_kill_over_default", "rank_kill", "default", ">= 10")
        over("rank_kill_over_torchrun", "rank_kill", "torchrun", ">= 1")
        floor = seconds["rank_kill", "floor"]
        metrics["rank_kill_over_floor"] = compared(
            seconds["rank_kill", "ours"], floor, role="limit", ratio="ours / theirs", goal="<= 1.5"
        )
    if ("rank_hang", "ours") in seconds:
        over("rank_hang", "rank_hang", "tuned", ">= 5")
        over("rank_hang_over_torchrun", "rank_hang", "torchrun", ">= 1")
    if ("node_kill", "ours") in seconds:
        over("node_kill", "node_kill", "tuned", ">= 2")
    if ("controller_kill", "ours") in seconds:
        note = NO_PEER if not found.survived else f"{NO_PEER}, but for {found.survived} runs"
        metrics["controller_kill"] = figure(seconds["controller_kill", "ours"], goal="<= 10", note=note)
    lost = [max(turns.steps_lost(run_dir), default=0) for run_dir in found.runs]
    metrics["steps_lost"] = figure([float(max(lost))], goal=f"<= {EVERY_STEPS}")
    metrics["loss_mismatches"] = figure([float(found.mismatches)], goal="<= 0")
    return metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="after one of warm-up")
    parser.add_argument("--base-port", type=int, default=7610, help="two ports from here on are used")
    parser.add_argument(
        "--fault", action="append", choices=FAULTS, help="only this one (again for more): a try, not kept"
    )
    arguments = parser.parse_args()
    faults = [fault for fault in FAULTS if fault in (arguments.fault or FAULTS)]
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-") as folder:
        found = measure(Path(folder), arguments.base_port, arguments.rounds, faults)
        metrics = metrics_of(found)
    packages = ("tidegate", "ray", "torch", "diffusers")
    publish("fault_to_step", metrics, rounds=arguments.rounds, packages=packages, whole=faults == list(FAULTS))


if __name__ == "__main__":
    main()
