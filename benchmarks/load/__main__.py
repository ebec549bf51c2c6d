"""Does a request get lost, or paid for twice, while everything changes around it?

    python -m benchmarks.load --seconds 70 --rate 24

A local cluster of two nodes with two logical GPUs each serves light pictures to an open loop of clients, some of which
leave early or ask for too much. Meanwhile: steady; a claim takes every GPU; the provider loses some answers that it was
paid for and is killed; it comes back; the claim ends and the replicas come home. Arbiter, gateway, router, ledger and
provider are the real ones, the engine only waits. Then `tidegate audit` and the clients' own notes are judged.

Writes load.json and load.md; exits with 1 if anything did not hold.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.contenders.light_apps import MODEL, SIDE
from benchmarks.contract import this_machine
from benchmarks.load import verdict
from benchmarks.load.client import Clients
from benchmarks.load.ground import REPLICAS, SLOTS, ground
from benchmarks.load.story import DROPS, Provider, Story, wait_for
from benchmarks.load.summary import Summary, kinds, page, seen, write
from benchmarks.soak.verdict import Check

from tidegate.json_lines import read_lines
from tidegate.ports import free_port
from tidegate.serve.ledger_reading import read_audited, read_totals

SERVICE_S = 0.1
"""Of one picture, here and at the provider."""
RATE_PER_S = 24.0
PHASE_S = 70.0


def say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {line}", flush=True)


@dataclass(slots=True, kw_only=True)
class LoadTest:
    folder: Path
    base_port: int
    rate_per_s: float
    phase_s: float
    seed: int
    haproxy: bool
    clients: Clients = field(init=False)
    provider: Provider = field(init=False)
    story: Story = field(init=False)

    def __post_init__(self) -> None:
        self.clients = Clients(
            url=f"http://127.0.0.1:{self.base_port + 2}",
            model=MODEL,
            side=SIDE,
            rate_per_s=self.rate_per_s,
            seed=self.seed,
            log=self.folder / "clients.jsonl",
        )
        self.provider = Provider(port=free_port(), latency_s=SERVICE_S, slots=SLOTS)
        self.story = Story(provider=self.provider, replicas=REPLICAS, say=say)

    @property
    def ledgers(self) -> Path:
        return self.folder / "state" / "ledger"

    def run(self) -> Summary:
        with (
            self.provider,
            ground(self.folder, self.base_port, self.story, service_s=SERVICE_S, haproxy=self.haproxy),
        ):
            try:
                self._play()
            finally:
                self.clients.stop()
        return self._judge()

    def _play(self) -> None:
        say(f"{self.story.replicas} replicas serve; {self.rate_per_s:g} asks a second, {self.phase_s:g} s a phase")
        self.clients.start()
        self.story.play(self.phase_s)
        self.clients.stop()
        say(f"{self.clients.sent} asks, all ended")
        # A gateway writes its rows some time after its answer, and the cluster ends it by SIGKILL.
        wait_for(lambda: not read_totals(self.ledgers)["open"], "the ledger is written", 20.0)

    def _judge(self) -> Summary:
        heard = list(read_lines(self.clients.log))
        ledger = list(read_audited(self.ledgers))
        audited = self._audit()
        canaries = int(read_totals(self.ledgers)["canaries"])
        books = {**self.provider.books, "canaries": canaries}
        first, last = self.story.phases[0], self.story.phases[-1]
        lasted_s = last.ended_at_s - first.began_at_s
        rate = self.clients.sent / lasted_s
        phases = seen(self.story.phases, heard)
        zero = [phase for phase in phases if phase.replicas == 0]
        return Summary(
            minutes=round(lasted_s / 60, 2),
            rate_per_s=round(rate, 2),
            seed=self.seed,
            haproxy=self.haproxy,
            asks=kinds(heard),
            phases=phases,
            audit=audited,
            provider=books,
            checks=(
                Check(
                    name="the story was played: all GPUs went and came back",
                    holds=len(zero) == 3 and zero[0].spilled > 0 and phases[-1].local > 0,
                    detail=", ".join(f"{phase.name}: {phase.replicas} replicas" for phase in phases),
                ),
                *verdict.checks(heard, ledger, audited, books, asked=self.clients.sent, lost_max=SLOTS + DROPS),
            ),
            versions={name: version(name) for name in ("tidegate", "ray")},
            machine=this_machine(),
            at=datetime.now(UTC).replace(microsecond=0).isoformat(),
        )

    def _audit(self) -> dict[str, Any]:
        """As an operator asks for it."""
        command = [sys.executable, "-m", "tidegate.cli.main", "audit", "--since", "1d", "--grace-s", "0", "--json"]
        done = subprocess.run(
            [*command, "--state-dir", str(self.ledgers.parent)], capture_output=True, text=True, check=False
        )
        if done.returncode not in (0, 1):
            raise RuntimeError(f"`tidegate audit` failed: {done.stderr[-1000:]}")
        said: dict[str, Any] = json.loads(done.stdout)
        return said


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=PHASE_S, help="of each phase (default: %(default)g)")
    parser.add_argument("--rate", type=float, default=RATE_PER_S, help="asks a second (default: %(default)g)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--haproxy", action="store_true", help="instead of Serve's Python proxy")
    parser.add_argument("--base-port", type=int, default=7660, help="three ports from here on are used")
    parser.add_argument("--output", type=Path, default=Path("load-output"))
    arguments = parser.parse_args(argv)
    output = arguments.output.resolve()
    shutil.rmtree(output / "work", ignore_errors=True)
    (output / "work").mkdir(parents=True)
    test = LoadTest(
        folder=output / "work",
        base_port=arguments.base_port,
        rate_per_s=arguments.rate,
        phase_s=arguments.seconds,
        seed=arguments.seed,
        haproxy=arguments.haproxy,
    )
    summary = test.run()
    write(summary, output)
    print(page(summary))
    return 0 if summary.holds else 1


if __name__ == "__main__":
    sys.exit(main())
