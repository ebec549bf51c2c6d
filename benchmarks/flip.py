"""Seconds from a claim to the GPUs in the gang's hands, and to the gang's first step: ours, Serve's, and the floor.

Three nodes of one logical GPU, a replica on each; the gang takes two. The floor has two nodes of its own. `idle`: no
request is under way. `busy`: requests of 3 s keep nearly all replicas at work. In each round every contender gives its
GPUs away and gets them back:

* ours: a claim; arbiter, gateway, pools and stand-in provider are the real ones, the engine only waits;
* Serve, by a config change to fewer replicas, followed by a Ray Train start: at its defaults, and with
  `graceful_shutdown_wait_loop_s: 0.1` (a shorter `graceful_shutdown_timeout_s` would let requests fail);
* the floor: `ray.kill`, a placement group, an actor in each bundle that makes the gang's step, and nothing around it.
  Nobody is asked, so only `idle` has one.

The gang is a Ray Train worker group of two that makes one small step, started by our trainer in the group that stands
already, and by Ray Train's own for the peers. Peers are spared the start of the `serve deploy` command: their config
goes straight to the dashboard. Ours gives requests in flight 1 s (`serving.drain_deadline_s`); what is not done by
then, the provider answers.

`NAME` compares with the best peer, `NAME_over_default` with the default, `NAME_over_floor` with the floor; `NAME_gpus…`
ends at the GPUs, the others at the first step.

Takes about eight minutes on two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import httpx
import ray
from benchmarks.contenders.flip_turns import FLOOR_NODES, NODES, PEERS, Lanes, Took
from benchmarks.contenders.light_apps import MODEL, SIDE
from benchmarks.contenders.load import Load
from benchmarks.contract import Metric, compared, figure, publish

from benchmarks import arena
from tidegate.cli.connect import connect
from tidegate.ports import free_port
from tidegate.testing.local_cluster import end_with_parent

SERVICE_S = 3.0
RATE_PER_S = 0.9
"""Of the one request a second that three replicas can answer."""
LEAD_IN_S = 4.0
"""Of load before the ask: every replica has one request at work then."""
GOALS = {"idle": ">= 2.5", "busy": ">= 3"}
"""Over Serve's default."""

TURNS: Mapping[str, Callable[[Lanes], Took]] = {
    "ours": Lanes.ours,
    "floor": Lanes.floor,
    "default": lambda lanes: lanes.peer("default"),
    "tuned": lambda lanes: lanes.peer("tuned"),
}
MODES: Mapping[str, tuple[str, ...]] = {"idle": tuple(TURNS), "busy": ("ours", *PEERS)}

Found = dict[str, dict[str, list[Took]]]
"""Mode -> contender -> what each round took."""


def load_on(contender: str, http_port: int) -> Load:
    url = f"http://127.0.0.1:{http_port}"
    if contender == "ours":
        body = {"model": MODEL, "prompt": "a light", "size": f"{SIDE}x{SIDE}"}
        return Load(f"{url}/v1/images/generations", body, RATE_PER_S)
    return Load(f"{url}/{contender}", {}, RATE_PER_S)


@contextlib.contextmanager
def provider(port: int) -> Iterator[dict[str, object]]:
    """The stand-in provider as a process; gives its entry in the policy."""
    command = ["-m", "tidegate.testing.standin_provider", "--port", str(port), "--latency-s", "0.2", "--slots", "16"]
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen([sys.executable, *command], preexec_fn=end_with_parent) as process:
        try:
            deadline = time.monotonic() + 30
            while not _answers(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError("the stand-in provider does not answer")
                time.sleep(0.1)
            yield {"name": "stand-in", "base_url": f"{url}/v1", "models": {MODEL: "stand-in-image"}, "slots": 16}
        finally:
            process.terminate()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2.0).status_code == 200
    except httpx.HTTPError:
        return False


def play(lanes: Lanes, mode: str, contender: str) -> tuple[Took, Load | None]:
    """One turn. A load under which it was played still waits for its last answers."""
    if mode == "idle":
        return TURNS[contender](lanes), None
    load = load_on(contender, lanes.http_port)
    load.start()
    time.sleep(LEAD_IN_S)
    took = TURNS[contender](lanes)
    load.stop()
    return took, load


def measure(folder: Path, base_port: int, rounds: int) -> tuple[Found, dict[str, list[str]]]:
    """What every turn took after one round of warm-up, and contender -> its failed requests over all rounds."""
    found: Found = {mode: {name: [] for name in names} for mode, names in MODES.items()}
    failed: dict[str, list[str]] = {"ours": [], **{name: [] for name in PEERS}}
    names = (*NODES, *FLOOR_NODES)
    environment = arena.fake_gpus(folder / "nvml", names, 1)
    peers_resources = {"RAY_OVERRIDE_RESOURCES": json.dumps(dict.fromkeys(PEERS, 1))}
    for of_node in environment[: len(NODES)]:
        of_node.update(peers_resources)
    with (
        provider(free_port()) as way_out,
        arena.cluster(base_port, (1,) * len(names), environment) as cluster,
    ):
        serving = {"drain_deadline_s": 1.0, "return_dwell_s": 0.2}
        # GPUs that came home would stay for a while, and the next turn's claim would wait for that.
        policy = arena.write_policy(folder, serving=serving, claims={"dwell_s": 0.0}, providers=[way_out])
        arena.start_control_plane(policy, cluster.address)
        connect(cluster.address)
        try:
            lanes = Lanes(
                dashboard_url=cluster.dashboard_url,
                http_port=base_port + 2,
                policy=policy,
                service_s=SERVICE_S,
                folder=folder,
            )
            lanes.open()
            for number in range(rounds + 1):
                for mode, names in MODES.items():
                    loads = {}
                    for name in names:
                        took, loads[name] = play(lanes, mode, name)
                        shown = f"GPUs after {took.gpus_s:.2f} s, first step after {took.step_s:.2f} s"
                        print(f"round {number or 'warm-up'}, {mode}: {name}: {shown}", flush=True)
                        if number:
                            found[mode][name].append(took)
                    lanes.restore()
                    for name, load in loads.items():
                        if load is not None:
                            load.finish()
                            failed[name] += load.problems
                            if load.problems:
                                print(f"{name}: {len(load.problems)} of {load.sent} failed: {load.problems[0]}")
        finally:
            ray.shutdown()
    return found, failed


def metrics_of(found: Found, failed: Mapping[str, list[str]]) -> dict[str, Metric]:
    metrics: dict[str, Metric] = {}
    parts: Mapping[str, Callable[[Took], float]] = {"": lambda took: took.step_s, "_gpus": lambda took: took.gpus_s}
    for mode, turns in found.items():
        for suffix, part in parts.items():
            seconds = {name: [part(took) for took in turns[name]] for name in turns}
            best = min(PEERS, key=lambda name: statistics.median(seconds[name]))
            for name, theirs, goal in ((mode, best, ">= 1"), (f"{mode}_over_default", "default", GOALS[mode])):
                metrics[name.replace(mode, mode + suffix)] = compared(
                    seconds["ours"], seconds[theirs], role="peer", ratio="theirs / ours", goal=goal
                )
            if "floor" in seconds:
                metrics[f"{mode}{suffix}_over_floor"] = compared(
                    seconds["ours"], seconds["floor"], role="limit", ratio="ours / theirs", goal="<= 1.3"
                )
    metrics["failed_requests"] = figure([float(len(failed["ours"]))], goal="<= 0")
    return metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="after one of warm-up")
    parser.add_argument("--base-port", type=int, default=7640, help="three ports from here on are used")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-") as folder:
        found, failed = measure(Path(folder), arguments.base_port, arguments.rounds)
    publish("flip", metrics_of(found, failed), rounds=arguments.rounds, packages=("tidegate", "ray"))


if __name__ == "__main__":
    main()
