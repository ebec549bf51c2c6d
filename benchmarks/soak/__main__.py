"""Half an hour of faults under constant load: does anybody notice?

    python -m benchmarks.soak --minutes 30 --seed 1

A local cluster of four nodes with two logical GPUs each serves digits to a client that never stops asking and checks
every answer; a long training run takes six of the GPUs, one node is spare. A script from the seed kills and stops
ranks, kills nodes, heats GPUs, kills the arbiter and Serve's controller and takes the provider away, one fault after
the other: the next comes when the last is healed and a checkpoint has been committed since. Then the run's records are
judged, its losses beside those of a run that nothing happened to (`torchrun` on the same machine).

Writes soak.json and soak.md; exits with 1 if anything did not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any

import ray
from benchmarks.contract import this_machine
from benchmarks.soak import faults, verdict
from benchmarks.soak.hands import Hands, gang_of
from benchmarks.soak.summary import Happened, Summary, page, write
from ray.job_submission import JobStatus

from tidegate.arbiter.client import ArbiterClient
from tidegate.cli.connect import connect
from tidegate.cli.demo.client import SteadyClient
from tidegate.cli.demo.looking import Look, claim_state, gang_step, running, wait_for
from tidegate.cli.demo.stage import GPUS_PER_NODE, MODEL, Stage, set_up
from tidegate.json_lines import read_lines
from tidegate.ports import free_port
from tidegate.serve.ledger import FLUSH_S
from tidegate.serve.ledger_reading import read_rows, read_totals
from tidegate.telemetry.goodput import SPANS, fractions, gpu_seconds, read_spans, refine, stalled_s

ROOT = Path(__file__).parents[2]
NODES = ("node-a", "node-b", "node-c", "node-d")
RANKS = 6
MIN_RANKS = 4
FAULTS_PER_MINUTE = 1.4
PACE_S = 0.4
"""Seconds that a step takes beside everything else on two cores: only the length of the soak depends on it."""
HEAL_DEADLINE_S = 300.0
LEDGERS_DEADLINE_S = 20.0
TOLERANCE = 0.02
GPU_SECONDS_SLACK = 0.02
POLICY = {
    "health": {
        # The gang gets a cooled GPU back while somebody watches, and six hot ones in a row are no bug of the rule.
        "temperature": {
            "limit_celsius": 78,
            "warn_celsius": 75,
            "release_celsius": 70,
            "release_after_s": 5,
        },
        "fleet_brake": {"node_share": 1.0, "nodes_per_domain": 100},
    },
}
# Gateways stand where no GPU is: machines that this script kills.
APP = {"gateway_labels": {"tidegate/name": f"!in({','.join(NODES)})"}}


def say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {line}", flush=True)


@dataclass(slots=True, kw_only=True)
class Soak:
    stage: Stage
    minutes: float
    seed: int
    steps: int
    script: tuple[faults.Fault, ...]
    hands: Hands = field(init=False)
    client: SteadyClient = field(init=False)
    happened: list[Happened] = field(default_factory=list)
    began_at_s: float = 0.0
    ended_at_s: float = 0.0
    job_status: JobStatus | None = None
    _arbiter: ArbiterClient = field(default_factory=lambda: ArbiterClient(patience_s=HEAL_DEADLINE_S))

    def __post_init__(self) -> None:
        self.hands = Hands(stage=self.stage, ranks=RANKS)
        self.client = SteadyClient(self.stage.url, MODEL, self.client_log)

    @property
    def client_log(self) -> Path:
        return self.stage.folder / "client.jsonl"

    def play(self) -> None:
        """From all GPUs serving to all GPUs serving again."""
        connect(self.stage.cluster.address)
        try:
            gpus = GPUS_PER_NODE * len(NODES)
            self.wait(lambda now: running(now) == gpus, 300, f"{gpus} replicas serve")
            self.began_at_s = time.time()
            self.client.start()
            say(f"{gpus} replicas serve; training of {self.steps} steps takes {RANKS} of them")
            self.stage.submit_training(RANKS, "--min-gpus", str(MIN_RANKS))
            self.wait(self.hands.whole, 240, f"{RANKS} ranks train")
            training_s = time.monotonic()
            for fault in self.script:
                self.await_turn(fault, training_s)
                self.inflict(fault)
            say("no more faults; training goes to its end")
            left_s = 4 * PACE_S * self.steps
            self.wait(lambda now: claim_state(now) in ("returning", "done"), left_s, "training ends")
            self.wait(lambda now: now["spillway"] == "closed" and running(now) > 0, 240, "traffic is home")
            self.wait(self.job_ended, 60, "the job has ended")
        finally:
            self.client.stop()
            self.ended_at_s = time.time()
            self.await_ledgers()
            ray.shutdown()

    def await_ledgers(self) -> None:
        """Until they are written: a gateway does so some time after its answer, and the stage ends it by SIGKILL. What
        is not there by then is for the verdict to find."""
        deadline = time.monotonic() + LEDGERS_DEADLINE_S
        while time.monotonic() < deadline:
            totals = read_totals(self.stage.state_dir / "ledger")
            if totals["sent"] == self.client.sent and not totals["open"]:
                return
            time.sleep(FLUSH_S)

    def await_turn(self, fault: faults.Fault, training_s: float) -> None:
        """Until the fault's share of the minutes or of the steps has passed, and the one before is over in all."""
        due_s = training_s + 60 * self.minutes * fault.at_share
        committed = gang_of(self.look())["committed_step"]

        def ready(now: Look) -> bool:
            due = time.monotonic() >= due_s or gang_step(now) >= fault.at_share * self.steps
            return due and self.hands.whole(now) and gang_of(now)["committed_step"] > committed

        self.wait(ready, max(0.0, due_s - time.monotonic()) + HEAL_DEADLINE_S, f"fault {fault.number} may come")

    def inflict(self, fault: faults.Fault) -> None:
        # Pids of this very moment: one of an older look may be another process by now.
        now = self.wait(self.hands.whole, HEAL_DEADLINE_S, "the gang is whole")
        done = self.hands.inflict(fault, now)
        say(f"fault {fault.number} of {len(self.script)} at step {gang_step(now)}: {done.what}")
        self.wait(done.healed, HEAL_DEADLINE_S, f"it is healed: {done.what}")
        healed_s = time.time() - done.at_s
        if done.take_back is not None:
            time.sleep(max(0.0, done.at_s + fault.lasts_s - time.time()))
            done.take_back()
        say(f"  healed after {healed_s:.1f} s; {self.client.sent} requests, {len(self.client.problems)} failed")
        self.happened.append(
            Happened(
                number=fault.number,
                kind=str(fault.kind),
                what=done.what,
                at_s=round(done.at_s - self.began_at_s, 1),
                step=gang_step(now),
                healed_after_s=round(healed_s, 2),
            )
        )

    def job_ended(self, _now: Look) -> bool:
        self.job_status = self.stage.job_status()
        return self.job_status is JobStatus.SUCCEEDED

    def look(self) -> Look:
        """The arbiter's status; while it restarts, its next one."""
        self.stage.check_job()
        return asyncio.run(self._arbiter.status())

    def wait(self, condition: Any, deadline_s: float, what: str) -> Look:
        return wait_for(self.look, condition, deadline_s, what)

    # --- afterwards, from the records alone -----------------------------------------------------------------------

    def judge(self, undisturbed: Path) -> Summary:
        client = list(read_lines(self.client_log))
        totals = read_totals(self.stage.state_dir / "ledger")
        ended: dict[str, int] = {}
        for row in read_rows(self.stage.state_dir / "ledger"):
            if row.outcome is not None:
                ended[row.request_id] = ended.get(row.request_id, 0) + 1
        rows = list(read_lines(self.stage.run_dir / "metrics.jsonl"))
        curves = verdict.compare(rows, read_lines(undisturbed / "metrics.jsonl"), self.steps)
        spans = read_spans(self.stage.state_dir / SPANS)
        counted = gpu_seconds(spans, self.began_at_s, self.ended_at_s)
        commits = list(read_lines(self.stage.run_dir / "checkpoints.jsonl"))
        shares = fractions(refine(counted, totals["compute_s"], stalled_s(commits)))
        wall_s = self.ended_at_s - self.began_at_s
        there_s = GPUS_PER_NODE * len(NODES) * wall_s - sum(
            outage.gpus * (outage.end_s - outage.begin_s) for outage in self.hands.outages
        )
        last = max(verdict.newest(rows), default=0)
        wanted = len(self.script)
        return Summary(
            minutes=round(wall_s / 60, 1),
            seed=self.seed,
            faults=self.happened,
            requests={**totals, "asked": self.client.sent},
            training={
                "steps": last,
                "generations": max(row["generation"] for row in rows),
                "steps done again": len(rows) - last,
                "checkpoints": len(commits),
                "loss first": rows[0]["loss"],
                "loss last": rows[-1]["loss"],
                "bit-identical steps": curves.exact_steps,
            },
            goodput=shares,
            checks=(
                verdict.Check(
                    name="faults that happened", holds=len(self.happened) == wanted, detail=f"{len(self.happened)}"
                ),
                verdict.Check(
                    name="training reached its step count", holds=last == self.steps, detail=f"{last} of {self.steps}"
                ),
                verdict.Check(
                    name="the job that was submitted succeeded",
                    holds=self.job_status is JobStatus.SUCCEEDED,
                    detail=str(self.job_status),
                ),
                *verdict.request_checks(client, totals, ended, self.client.sent),
                *verdict.curve_checks(curves, TOLERANCE),
                *verdict.goodput_checks(shares, sum(counted.values()), there_s, GPU_SECONDS_SLACK),
            ),
            versions={name: version(name) for name in ("tidegate", "ray", "torch")},
            machine=this_machine(),
            at=datetime.now(UTC).replace(microsecond=0).isoformat(),
        )


def train_undisturbed(stage: Stage, run_dir: Path) -> None:
    """The same config and data in as many ranks, without a cluster around them."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}"]
    command += [f"--master-port={free_port()}", "-m", "tidegate.train", "--config", str(stage.config)]
    command += ["--data", str(stage.folder / "shards"), "--run-dir", str(run_dir)]
    with (stage.folder / "undisturbed.log").open("wb") as log:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=log, check=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="of faults, about (default: %(default)s)")
    parser.add_argument(
        "--faults", type=int, help=f"default: {FAULTS_PER_MINUTE:g} a minute, one of each kind at least"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--base-port", type=int, default=7710, help="four ports from here on are used")
    parser.add_argument("--output", type=Path, default=Path("soak-output"))
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, _as_interrupt)
    count = arguments.faults or max(len(faults.Kind), round(FAULTS_PER_MINUTE * arguments.minutes))
    steps = max(300, int(60 * arguments.minutes / PACE_S))
    output = arguments.output.resolve()
    stage = Stage(
        root=ROOT,
        folder=output / "stage",
        base_port=arguments.base_port,
        steps=steps,
        nodes=NODES,
        policy_changes=POLICY,
        app_args=APP,
    )
    script = faults.script(arguments.seed, count)
    soak = Soak(stage=stage, minutes=arguments.minutes, seed=arguments.seed, steps=steps, script=script)
    with set_up(stage, say):
        soak.play()
    say("the cluster is gone; the same training runs once more, undisturbed")
    train_undisturbed(stage, stage.folder / "undisturbed")
    summary = soak.judge(stage.folder / "undisturbed")
    write(summary, output)
    print(page(summary))
    return 0 if summary.holds else 1


def _as_interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
