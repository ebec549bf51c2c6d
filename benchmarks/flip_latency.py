"""What a flip does to those who wait for a picture: their 99th percentile while GPUs change hands, over a quiet one.

Four replicas of 0.2 s a picture get an open loop of requests (Poisson) at 70 % of what they can answer. In each round:
some seconds of peace; then a claim takes every GPU, keeps them for some seconds, gives them back, and all replicas come
home. The provider takes 0.2 s a picture too, so every longer wait is the flip's. Arbiter, gateway, router, ledger,
HAProxy ingress and provider are the real ones, the engine only waits. A flip lasts from the filing of the claim to the
last replica home and the spillway closed; a request belongs to the part in which it was sent.

Takes about five minutes on two cores.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.contenders.light_apps import MODEL, SIDE
from benchmarks.contract import Metric, compared, figure, publish
from benchmarks.load.asks import Kind
from benchmarks.load.client import Clients
from benchmarks.load.ground import REPLICAS, SLOTS, ground
from benchmarks.load.story import Provider, Story

from tidegate.json_lines import read_lines
from tidegate.ports import free_port

SERVICE_S = 0.2
RATE_PER_S = 0.7 * REPLICAS / SERVICE_S
STEADY_S = 20.0
HELD_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Three moments."""

    steady_at_s: float
    claimed_at_s: float
    home_at_s: float


def p99_s(heard: Sequence[Mapping[str, Any]], from_s: float, to_s: float) -> float:
    took_s = [row["took_s"] for row in heard if from_s <= row["sent_at_s"] < to_s]
    return statistics.quantiles(took_s, n=100, method="inclusive")[98]


def play(story: Story) -> Round:
    steady_at_s = time.time()
    time.sleep(STEADY_S)
    claimed_at_s = time.time()
    claim = story.claim()
    time.sleep(HELD_S)
    story.give_back(claim)
    return Round(steady_at_s=steady_at_s, claimed_at_s=claimed_at_s, home_at_s=time.time())


def measure(folder: Path, base_port: int, rounds: int) -> tuple[list[Round], list[dict[str, Any]]]:
    """The rounds after one of warm-up, and what every client heard."""
    provider = Provider(port=free_port(), latency_s=SERVICE_S, slots=SLOTS)
    story = Story(provider=provider, replicas=REPLICAS, say=print)
    log = folder / "clients.jsonl"
    played = []
    with provider, ground(folder, base_port, story, service_s=SERVICE_S, haproxy=True) as url:
        clients = Clients(
            url=url, model=MODEL, side=SIDE, rate_per_s=RATE_PER_S, seed=1, log=log, shares={Kind.SOUND: 1.0}
        )
        clients.start()
        try:
            for number in range(rounds + 1):
                one = play(story)
                took_s = one.home_at_s - one.claimed_at_s
                print(f"round {number or 'warm-up'}: there and back in {took_s:.1f} s", flush=True)
                if number:
                    played.append(one)
        finally:
            clients.stop()
    return played, list(read_lines(log))


def metrics_of(played: Sequence[Round], heard: Sequence[Mapping[str, Any]]) -> dict[str, Metric]:
    steady = [p99_s(heard, one.steady_at_s, one.claimed_at_s) for one in played]
    flip = [p99_s(heard, one.claimed_at_s, one.home_at_s) for one in played]
    failed = [row for row in heard if row["status"] != 200 or row["problem"]]
    for row in failed[:5]:
        print(f"failed: number {row['number']}, status {row['status']} {row['code'] or ''} {row['problem'] or ''}")
    return {
        "p99_over_steady": compared(flip, steady, role="limit", ratio="ours / theirs", goal="<= 2"),
        "failed_requests": figure([float(len(failed))], goal="<= 0", note=f"of {len(heard)}"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="after one of warm-up")
    parser.add_argument("--base-port", type=int, default=7680, help="three ports from here on are used")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-") as folder:
        played, heard = measure(Path(folder), arguments.base_port, arguments.rounds)
    publish("flip_latency", metrics_of(played, heard), rounds=arguments.rounds, packages=("tidegate", "ray"))


if __name__ == "__main__":
    main()
