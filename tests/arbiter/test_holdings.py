"""Who held which GPUs, read back from the journal, and what a run's GPU-seconds were spent on."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from story import NODES, Story, ask, gpu
from typer.testing import CliRunner

from tidegate.arbiter.holdings import Holding, holdings
from tidegate.arbiter.journal import JOURNAL, FileJournal, read_moves
from tidegate.arbiter.loop import ArbiterLoop
from tidegate.arbiter.messages import GangPhase
from tidegate.arbiter.states import ClaimState
from tidegate.cli.main import app
from tidegate.cli.report import read_report
from tidegate.errors import NoRecordsError, UnknownSubjectError
from tidegate.ids import ClaimId, GatewayId, RequestId, Tier
from tidegate.serve.ledger import Attempt, AttemptOutcome, Ledger, Outcome
from tidegate.telemetry.goodput import SPANS, SpanBook


class Recorded(Story):
    """A story whose journal and spans lie in files, as the arbiter's actor keeps them."""

    folder: Path

    def restart(self) -> None:
        self.loop = ArbiterLoop(
            self.fleet, self.clock, FileJournal(self.folder / JOURNAL), self.policy, SpanBook(self.folder / SPANS)
        )


@pytest.fixture
def story(tmp_path: Path) -> Recorded:
    Recorded.folder = tmp_path
    story = Recorded()
    story.tick(10)
    return story


def play(story: Recorded, name: str, *, gpus: int = 6, ticks: int = 50) -> ClaimId:
    """A whole run."""
    claim = story.file(ask(name, gpus=gpus, at_least=1))
    story.until(claim, ClaimState.GRANTED)
    story.phases[claim] = GangPhase.RUNNING
    story.tick(ticks)
    story.phases[claim] = GangPhase.FINISHED
    story.until(claim, ClaimState.DONE)
    del story.phases[claim]
    return claim


def held(story: Recorded) -> tuple[Holding, ...]:
    return holdings(read_moves(story.folder / JOURNAL), story.clock.now_s())


def test_a_holding_lasts_from_the_drain_until_the_run_has_ended(story: Recorded) -> None:
    play(story, "first")
    story.tick(20)
    play(story, "second", gpus=2)
    first, second = held(story)
    assert (first.run, second.run) == ("first", "second")
    assert first.gpus == {gpu(node, index) for node in NODES for index in range(2)}
    assert len(second.gpus) == 2
    assert first.end_s < second.start_s
    assert 10.0 < first.end_s - first.start_s < 15.0, "fifty ticks of a fifth of a second, and the flip before"


def test_a_run_that_goes_on_is_held_until_now(story: Recorded) -> None:
    claim = story.file(ask())
    story.until(claim, ClaimState.GRANTED)
    story.tick(5)
    (only,) = held(story)
    assert only.end_s == story.clock.now_s()


def test_a_gpu_that_was_never_granted_is_the_runs_all_the_same(story: Recorded) -> None:
    """Quarantined inside a node that the gang has: nobody else can use it."""
    story.loop.quarantine(gpu(NODES[0], 0), Tier.SERVE, "smells")
    story.tick(3)
    play(story, "run", gpus=5)
    (only,) = held(story)
    assert gpu(NODES[0], 0) in only.gpus


def test_the_reports_shares_add_up(story: Recorded) -> None:
    play(story, "first")
    claim = story.file(ask("second", gpus=4, at_least=4))
    story.until(claim, ClaimState.GRANTED)
    story.phases[claim] = GangPhase.RUNNING
    story.tick(30)
    story.hot.add(gpu(story.claim(claim).nodes[0], 0))
    story.tick(20)
    cluster = read_report(story.folder, None)
    assert cluster["gpu_hours"] == pytest.approx(6 * (cluster["until_s"] - cluster["since_s"]) / 3600, abs=1e-5)
    assert sum(row["gpu_hours"] for row in cluster["owners"].values()) == pytest.approx(cluster["gpu_hours"], abs=1e-5)
    assert sum(round(row["percent"] * 10) for row in cluster["owners"].values()) == 1000
    assert list(cluster["runs"]) == ["first", "second"]
    won = sum(run["spill"]["gpu_hours_won"] for run in cluster["runs"].values())
    assert won == pytest.approx(cluster["owners"]["productive"]["gpu_hours"], abs=1e-5), "a GPU-second has one run"
    second = read_report(story.folder, "second")
    assert second["owners"]["quarantined"]["gpu_hours"] > 0
    assert sum(round(row["percent"] * 10) for row in second["owners"].values()) == 1000
    assert "serving_idle" not in second["owners"]


def test_money_and_requests_of_the_time_in_which_a_run_held_gpus(story: Recorded) -> None:
    ledger = Ledger(story.folder / "ledger", GatewayId("g"))

    def spill(name: str) -> None:
        now_s = story.clock.now_s()
        ledger.accept(RequestId(name), now_s)
        ledger.attempt(
            Attempt(
                request=RequestId(name),
                attempt=1,
                backend="provider/out",
                started_at_s=now_s,
                ended_at_s=now_s + 1,
                outcome=AttemptOutcome.ANSWERED,
                price_usd=0.5,
            )
        )
        ledger.end(RequestId(name), now_s + 1, Outcome.ANSWERED, backend="provider/out", images=1)

    spill("before")
    claim = story.file(ask("run"))
    story.until(claim, ClaimState.GRANTED)
    story.phases[claim] = GangPhase.RUNNING
    story.tick(2)
    spill("meanwhile")
    story.tick(48)
    story.phases[claim] = GangPhase.FINISHED
    story.until(claim, ClaimState.DONE)
    spill("after")
    story.tick(10)
    ledger.close()
    cluster, run = read_report(story.folder, None), read_report(story.folder, "run")
    assert (cluster["requests"]["spilled"], cluster["spill"]["usd"]) == (3, 1.5)
    assert (run["requests"]["spilled"], run["spill"]["usd"]) == (1, 0.5)
    won = run["owners"]["productive"]["gpu_hours"]
    assert run["spill"]["usd_per_gpu_hour_won"] == pytest.approx(0.5 / won, rel=1e-3)
    late = read_report(story.folder, None, last_s=1.0)
    assert (late["requests"]["spilled"], late["gpu_hours"]) == (0, pytest.approx(6 / 3600, abs=1e-5))


def test_what_is_not_there_is_said(story: Recorded, tmp_path: Path) -> None:
    play(story, "first")
    with pytest.raises(UnknownSubjectError, match="known here: first"):
        read_report(story.folder, "frist")
    with pytest.raises(NoRecordsError, match="--state-dir"):
        read_report(tmp_path / "elsewhere", None)


def test_the_command_reads_a_copy_of_the_files_without_a_cluster(story: Recorded) -> None:
    play(story, "first")
    command = CliRunner()
    found = command.invoke(app, ["report", "first", "--state-dir", str(story.folder), "--json"])
    assert json.loads(found.stdout)["run"] == "first"
    said = command.invoke(app, ["report", "--state-dir", str(story.folder)])
    assert said.exit_code == 0
    assert "productive" in said.stdout
    nobody = command.invoke(app, ["report", "frist", "--state-dir", str(story.folder)])
    assert nobody.exit_code == 1
    assert "known here: first" in nobody.stderr
    assert command.invoke(app, ["report", "--run-dir", "x", "--state-dir", str(story.folder)]).exit_code == 2


def test_while_no_arbiter_looks_nobody_knows(story: Recorded) -> None:
    """Every GPU-second has one owner also over restarts: the gap is `unknown`, to the moment."""
    claim = story.file(ask())
    story.until(claim, ClaimState.GRANTED)
    story.phases[claim] = GangPhase.RUNNING
    story.tick(30)
    for gap_s in (3.0, 45.0):
        last_look_s = (story.folder / SPANS).stat().st_mtime
        with (story.folder / SPANS).open("a") as file:
            file.write('{"start_s": 1, "own')  # it dies while it writes
        os.utime(story.folder / SPANS, (last_look_s, last_look_s))
        story.clock.advance(gap_s)  # whatever happens now, nobody writes it down
        story.restart()
        story.tick(25)
    found = read_report(story.folder, "run")
    assert found["owners"]["unknown"]["gpu_hours"] == pytest.approx(6 * (3.2 + 45.2) / 3600, abs=1e-5)
    assert found["gpu_hours"] == pytest.approx(6 * (found["until_s"] - found["since_s"]) / 3600, abs=1e-5)
    cluster = read_report(story.folder, None)
    assert cluster["gpu_hours"] == pytest.approx(6 * (cluster["until_s"] - cluster["since_s"]) / 3600, abs=1e-5)
