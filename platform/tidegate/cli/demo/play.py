"""The acts, in order."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import ray
import yaml
from rich.console import Console
from rich.table import Table

from tidegate.arbiter.client import ArbiterClient
from tidegate.cli.connect import connect
from tidegate.cli.demo.client import SteadyClient, ask_digits
from tidegate.cli.demo.digits import Judge
from tidegate.cli.demo.looking import claim_state, gang_step, running, wait_for
from tidegate.cli.demo.pictures import draw_before_after, draw_timeline
from tidegate.cli.demo.report import build_report, write_report
from tidegate.cli.demo.screen import Screen
from tidegate.cli.demo.stage import GPUS_PER_NODE, JOB, MODEL, NODES, Stage, WaitedTooLongError, set_up
from tidegate.gang.coordinator import JOURNAL as GANG_JOURNAL
from tidegate.json_lines import read_lines

PER_CLASS = 20
SEED = 7
HOT_NODE, HOT_INDEX, HOT_CELSIUS = "node-b", 1, 79
GPUS = GPUS_PER_NODE * len(NODES)
SLOW_S = 900.0
"""What any one act may take: ten times the usual, as a machine with other things to do is slow, not broken."""


def play(output: Path, *, base_port: int, steps: int | None) -> int:
    """Play the whole demo; returns the exit code. Everything that it started is gone afterwards."""
    console = Console()
    # Set outright: started in the background of a script, a process inherits an ignored SIGINT.
    signal.signal(signal.SIGINT, _as_interrupt)
    signal.signal(signal.SIGTERM, _as_interrupt)
    output.mkdir(parents=True, exist_ok=True)
    stage = Stage(root=Path.cwd(), folder=output.resolve() / "stage", base_port=base_port, steps=steps)
    try:
        with Screen(console) as screen:
            drama = _Drama(stage=stage, output=output, screen=screen)
            with set_up(stage, screen.say):
                drama.play_and_explain()
            report = drama.report()
    except KeyboardInterrupt:
        console.print("interrupted: everything that was started is gone")
        return 130
    _summary(console, report, output)
    return 0 if report["requests"]["failed"] == 0 else 1


@dataclass(slots=True, kw_only=True)
class _Drama:
    stage: Stage
    output: Path
    screen: Screen
    moments: dict[str, float] = field(default_factory=dict)
    judged: dict[str, float] = field(default_factory=dict)
    asked_beside: int = 0
    client: SteadyClient | None = None
    steps: int = 0
    _arbiter: ArbiterClient = field(default_factory=lambda: ArbiterClient(timeout_s=20.0))
    _pictures: dict[str, Any] = field(default_factory=dict)

    @property
    def client_log(self) -> Path:
        return self.stage.folder / "client.jsonl"

    def play(self) -> None:
        self.steps = yaml.safe_load(self.stage.config.read_text(encoding="utf-8"))["steps"]
        connect(self.stage.cluster.address)
        self.high_water()
        self.claim()
        self.weather()
        self.ebb()
        self.epilogue()

    def play_and_explain(self) -> None:
        """As `play`; where something does not happen, the job's own last words go with the error."""
        try:
            self.play()
        except WaitedTooLongError as error:
            raise WaitedTooLongError(f"{error}\nthe job's last lines:\n{self.stage.job_log()}") from None
        finally:
            # Before the cluster goes: what is asked after that could only fail.
            self.close()

    def close(self) -> None:
        if self.client is not None:
            self.client.stop()
        ray.shutdown()

    # --- Act 1 ---------------------------------------------------------------------------------------------------

    def high_water(self) -> None:
        self.screen.act("Act 1, high water: all six GPUs serve")
        self.wait(lambda now: running(now) == GPUS and now["spillway"] == "closed", SLOW_S, "six replicas serve")
        self.moments["began_at_s"] = time.time()
        self.client = SteadyClient(self.stage.url, MODEL, self.client_log)
        self.client.start()
        self.judge("before")
        self.show_for(8.0)

    # --- Act 2 ---------------------------------------------------------------------------------------------------

    def claim(self) -> None:
        self.screen.act("Act 2, the claim: training takes all six GPUs")
        self.stage.submit_training(GPUS)
        self.wait(lambda now: claim_state(now) == "granted" or gang_step(now) > 0, SLOW_S, "the claim is granted")
        self.screen.say("granted: replicas have drained, overflow goes to the provider")
        self.wait(lambda now: gang_step(now) > 0, SLOW_S, "the gang makes its first step")
        self.screen.say("six ranks train")

    # --- Act 3 ---------------------------------------------------------------------------------------------------

    def weather(self) -> None:
        self.screen.act("Act 3, weather: a rank dies, then a GPU runs hot")
        self.wait(lambda now: gang_step(now) >= self.steps // 5, SLOW_S, "a fifth of the steps is done")
        victim = next(pid for pid in self.look()["gangs"][-1]["pids"][3:] if pid is not None)
        self.moments["rank_killed_at_s"] = time.time()
        os.kill(victim, signal.SIGKILL)
        self.screen.say(f"SIGKILL to rank 3, process {victim}")
        self.wait(lambda _: len(self.first_steps()) >= 2, SLOW_S, "the gang makes a step again")
        self.screen.say("the gang goes on from its newest checkpoint, on the same GPUs")
        self.wait(lambda now: gang_step(now) >= self.steps // 2, SLOW_S, "half of the steps are done")
        self.moments["heated_at_s"] = time.time()
        self.stage.gpu_state(HOT_NODE).set(HOT_INDEX, "temp", HOT_CELSIUS)
        self.screen.say(f"GPU {HOT_INDEX} of {HOT_NODE} reads {HOT_CELSIUS} °C")
        self.wait(lambda _: self.first_steps()[-1]["world_size"] == GPUS - 1, SLOW_S, "the gang goes on with five")
        self.screen.say("its rank has left, the gang goes on with five")

    # --- Act 4 ---------------------------------------------------------------------------------------------------

    def ebb(self) -> None:
        self.wait(lambda now: claim_state(now) in ("returning", "done"), SLOW_S, "training ends")
        self.screen.act("Act 4, ebb: training has ended, replicas come home in steps")
        self.wait(lambda now: now["spillway"] == "closed" and running(now) == GPUS, SLOW_S, "all replicas are home")
        self.moments["home_at_s"] = time.time()
        self.screen.say("the spillway is closed; publishing the new weights")
        self.stage.command("tidegate", "publish", str(self.stage.run_dir / "export"))
        self.wait(lambda now: _swapped(now) >= GPUS, SLOW_S, "all replicas serve the new weights")
        status = self.stage.command("ray", "job", "status", JOB)
        if "succeeded" not in status.lower():
            raise WaitedTooLongError(f"the job has not succeeded: {status}")

    # --- Epilogue ------------------------------------------------------------------------------------------------

    def epilogue(self) -> None:
        self.screen.act(f"Epilogue: {10 * PER_CLASS} digits are asked for and judged")
        self.judge("after")
        self.show_for(4.0)
        assert self.client is not None
        self.client.stop()
        self.moments["ended_at_s"] = time.time()
        # The gateway writes its ledger twice a second.
        self.pause(1.5)

    def report(self) -> dict[str, Any]:
        report = build_report(
            self.stage.state_dir,
            self.stage.run_dir,
            self.client_log,
            asked_beside=self.asked_beside,
            moments=self.moments,
            judged=self.judged,
        )
        write_report(report, self.output / "report.json")
        draw_before_after(self._pictures["before"], self._pictures["after"], self.output / "before_after.png")
        names = {"rank_killed_at_s": "rank killed", "heated_at_s": "79 °C", "home_at_s": "home"}
        faults = [(self.moments[key], name) for key, name in names.items()]
        draw_timeline(self.stage.state_dir, self.client_log, faults, self.output / "timeline.png")
        return report

    # --- small pieces --------------------------------------------------------------------------------------------

    def judge(self, when: str) -> None:
        pictures, wanted, requests = ask_digits(self.stage.url, MODEL, PER_CLASS, SEED)
        self.asked_beside += requests
        self.judged[when] = Judge().accuracy(pictures, wanted)
        self._pictures[when] = np.stack([pictures[int(np.argmax(wanted == digit))] for digit in range(10)])
        self.screen.say(f"digits {when} training: {self.judged[when]:.1%} are what was asked for")

    def first_steps(self) -> list[dict[str, Any]]:
        lines = read_lines(self.stage.run_dir / GANG_JOURNAL)
        return [line["data"] for line in lines if line["kind"] == "first_step"]

    def look(self) -> dict[str, Any]:
        self.stage.check_job()
        status = asyncio.run(self._arbiter.status())
        self.screen.show(status, self.steps, self.client)
        return status

    def wait(self, condition: Callable[[dict[str, Any]], bool], deadline_s: float, what: str) -> None:
        """Look at the cluster until `condition` holds.

        Raises:
            WaitedTooLongError: it does not within `deadline_s`, or the run has failed.
        """
        wait_for(self.look, condition, deadline_s, what)

    def show_for(self, seconds: float) -> None:
        """For the audience's sake alone: a quarter of it in a shortened play."""
        self.pause(seconds if self.stage.steps is None else seconds / 4)

    def pause(self, seconds: float) -> None:
        """Let the audience see the present state for a while."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.look()
            time.sleep(0.5)


def _swapped(now: dict[str, Any]) -> int:
    """Living replicas that serve the newest weights."""
    newest = max((weights["version"] for weights in now["weights"].values()), default=0)
    fresh = [r for r in now["replicas"] if now["at_s"] - r["at_s"] < 5 and r["serving_version"] == newest]
    return len(fresh) if newest else 0


def _as_interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _summary(console: Console, report: dict[str, Any], output: Path) -> None:
    table = Table(title="The demo in figures", title_justify="left", show_header=False, box=None)
    table.add_column()
    table.add_column(justify="right")
    requests, training = report["requests"], report["training"]
    judged = f"{training['digit_accuracy_before']:.0%} -> {training['digit_accuracy_after']:.0%}"
    rows = (
        ("requests sent / failed", f"{requests['sent']} / {requests['failed']}"),
        ("answered here / spilled", f"{requests['local']} / {requests['spilled']}"),
        ("claim to granted", f"{report['flip']['claim_to_granted_s']:.1f} s"),
        ("claim to first step", f"{report['flip']['claim_to_first_step_s']:.1f} s"),
        ("rank killed to next step", f"{report['rank_kill']['to_next_step_s']:.1f} s"),
        ("steps done again after it", str(report["rank_kill"]["steps_lost"])),
        ("hot reading to rank gone", f"{report['hot_gpu']['reading_to_rank_gone_s']:.1f} s"),
        ("training's end to all home", f"{report['flip']['return_s']:.1f} s"),
        ("ranks over time", " -> ".join(map(str, training["world_sizes"]))),
        ("digits right, before -> after", judged),
        ("checkpoint stall, median", f"{report['checkpoints']['stall_p50_s'] * 1000:.1f} ms"),
    )
    for name, value in rows:
        table.add_row(name, value)
    console.print(table)
    console.print(f"report: {output / 'report.json'}", highlight=False)
    console.print(f"pictures: {output / 'before_after.png'}, {output / 'timeline.png'}", highlight=False)
