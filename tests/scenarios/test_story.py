"""The whole story, shortened, on a real cluster: the command that users run, and what they see beside it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray.util
from PIL import Image

from tidegate.cli.report import read_report
from tidegate.testing.local_cluster import MARKER
from waiting import wait_until

pytestmark = pytest.mark.cluster

REPOSITORY = Path(__file__).parents[2]
TIDEGATE = Path(sys.executable).parent / "tidegate"
STEPS = 100


def free_base_port() -> int:
    """Four free ports in a row, outside 10002-19999 (Ray's worker ports)."""
    for base in range(6500, 7500, 10):
        with socket.socket() as a, socket.socket() as b, socket.socket() as c, socket.socket() as d:
            try:
                for offset, probe in enumerate((a, b, c, d)):
                    probe.bind(("", base + offset))
            except OSError:
                continue
            return base
    raise AssertionError("no four free ports in a row between 6500 and 7500")


def of_demo(demo: Demo) -> list[str]:
    """Command lines of living processes that the demo started: its cluster's, its provider, its commands."""
    marker = f"{MARKER}={demo.process.pid}-".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) in (os.getpid(), demo.process.pid):
            continue
        try:
            words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            environment = (entry / "environ").read_bytes()
        except OSError:  # it has just ended
            continue
        if marker in environment or str(demo.folder) in words or f"--port {demo.base_port + 3}" in words:
            found.append(words)
    return found


class Demo:
    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self.base_port = free_base_port()
        self.log = folder / "demo.log"
        folder.mkdir(parents=True, exist_ok=True)
        command = [str(TIDEGATE), "demo", "--output", str(folder), "--base-port", str(self.base_port), *arguments]
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(command, cwd=REPOSITORY, stdout=out, stderr=subprocess.STDOUT)

    def said(self) -> str:
        return self.log.read_text(encoding="utf-8")

    def wait_for(self, words: str, deadline_s: float) -> None:
        wait_until(lambda: words in self.said() or self.process.poll() is not None, deadline_s, f"{words!r} is said")
        assert words in self.said(), self.said()

    def end(self) -> None:
        """Whatever happened, nothing of it goes on beside the tests that follow."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def ask(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Another terminal: `tidegate` against the demo's cluster."""
        # The cluster's address is the host's own, as Ray sees it.
        environment = {**os.environ, "RAY_ADDRESS": f"{ray.util.get_node_ip_address()}:{self.base_port}"}
        return subprocess.run(
            [str(TIDEGATE), *arguments], env=environment, capture_output=True, text=True, timeout=120, check=False
        )


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Play it once; what was seen on the way and what is left."""
    folder = tmp_path_factory.mktemp("demo")
    demo = Demo(folder, "--steps", str(STEPS))
    seen: dict[str, Any] = {}
    try:
        demo.wait_for("six ranks train", 600)
        seen["status"] = demo.ask("status", "--json")
        seen["status_text"] = demo.ask("status")
        seen["why"] = demo.ask("why", "digits", "--json")
        seen["why_nothing"] = demo.ask("why", "nonsense")
        seen["publish_nothing"] = demo.ask("publish", str(folder))
        seen["claims"] = demo.ask("claims", "--ended", "--json")
        seen["nodes"] = demo.ask("nodes", "--json")
        seen["watch"] = demo.ask("watch", "--once")
        seen["exit"] = demo.process.wait(timeout=600)
    finally:
        demo.end()
        seen["said"] = demo.said()
    seen["left"] = of_demo(demo)
    seen["folder"] = folder
    if (folder / "report.json").exists():
        seen["report"] = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return seen


def test_it_ends_well_and_leaves_nothing(seen: dict[str, Any]) -> None:
    assert seen["exit"] == 0, seen["said"]
    assert seen["left"] == []


def test_no_request_failed_and_some_were_spilled(seen: dict[str, Any]) -> None:
    requests = seen["report"]["requests"]
    assert requests["failed"] == 0
    assert requests["spilled"] > 0
    assert requests["local"] > 0
    assert requests["sent"] == requests["answered"] == requests["local"] + requests["spilled"]
    assert requests["open"] == requests["cancelled"] == requests["refused"] == 0


def test_six_ranks_then_five(seen: dict[str, Any]) -> None:
    training = seen["report"]["training"]
    assert training["world_sizes"] == [6, 5]
    assert training["steps"] == STEPS
    assert training["loss_last"] < training["loss_first"]


def test_faults_cost_no_more_than_the_interval_of_copies_in_memory(seen: dict[str, Any]) -> None:
    for fault in ("rank_kill", "hot_gpu"):
        assert 0 <= seen["report"][fault]["steps_lost"] <= 5, "every fifth step is kept in memory"
    # A reading is taken every second, and acted on in the arbiter's next tick: with room for a busy machine.
    assert seen["report"]["hot_gpu"]["reading_to_rank_gone_s"] < 5
    gang = (seen["folder"] / "stage" / "run" / "gang.jsonl").read_text(encoding="utf-8")
    assert "group_restarted" not in gang, "Ray Train's group was restarted"


def test_every_gpu_second_has_one_owner(seen: dict[str, Any]) -> None:
    goodput = seen["report"]["goodput"]
    assert sum(goodput.values()) == pytest.approx(1.0, abs=1e-3)
    for owner in ("productive", "serving", "restarting", "quarantined", "checkpoint"):
        assert goodput[owner] > 0, owner


def test_the_pictures_are_there(seen: dict[str, Any]) -> None:
    for name in ("before_after.png", "timeline.png"):
        with Image.open(seen["folder"] / name) as picture:
            assert picture.width >= 700


def test_status_shows_who_has_what(seen: dict[str, Any]) -> None:
    status = json.loads(seen["status"].stdout)
    assert [len(node["gpus"]) for node in status["nodes"]] == [2, 2, 2]
    assert {gpu["temperature_celsius"] for node in status["nodes"] for gpu in node["gpus"]} == {61.0}
    assert status["spillway"] == "open"
    assert status["claims"][0]["claim"] == "digits"
    # By the time of this second question a busy machine may have come to the first fault.
    assert any(word in seen["status_text"].stdout for word in ("trains", "restarting", "redoes"))


def test_why_tells_the_claims_story(seen: dict[str, Any]) -> None:
    told = [line["data"]["to"] for line in json.loads(seen["why"].stdout) if line["kind"] == "advance"]
    # A claim may say more than once why it is where it is; on a busy machine it may have run to its end by now.
    story = list(dict.fromkeys(told))
    assert story[:4] == ["proving", "draining", "granted", "running"]
    assert seen["why_nothing"].returncode == 1
    assert "tidegate status" in seen["why_nothing"].stdout


def test_claims_and_nodes_real_and_virtual(seen: dict[str, Any]) -> None:
    """On a busy machine the run may be over before all was asked."""
    (claim,) = json.loads(seen["claims"].stdout)
    assert (claim["claim"], claim["max_gpus"]) == ("digits", 6)
    assert claim["spill_usd_per_hour"] > 0, "a client asks all the time, and its pictures cost money elsewhere"
    nodes = json.loads(seen["nodes"].stdout)
    tenants = [gpu["tenant"] for node in nodes["nodes"] for gpu in node["gpus"]]
    assert len(tenants) == 6
    assert set(tenants) <= {"digits", "serving", "-"}
    (provider,) = nodes["virtual_nodes"]
    assert (provider["provider"], provider["price_per_image_usd"]) == ("stand-in", 0.01)
    assert provider["spent_usd"] > 0


def test_watch_once(seen: dict[str, Any]) -> None:
    assert seen["watch"].returncode == 0, seen["watch"].stderr
    assert "digits" in seen["watch"].stdout
    assert "spent on overflow" in seen["watch"].stdout


def test_the_report_is_there_after_the_end(seen: dict[str, Any]) -> None:
    state = seen["folder"] / "stage" / "state"
    found = read_report(state, "digits", run_dir=seen["folder"] / "stage" / "run")
    assert sum(round(owner["percent"] * 10) for owner in found["owners"].values()) == 1000
    assert found["spill"]["gpu_hours_won"] > 0
    assert found["gang"]["generations"] >= 3
    whole = read_report(state, None)
    assert whole["requests"]["failed"] == 0
    assert whole["spill"]["usd"] >= found["spill"]["usd"] > 0


def test_publishing_no_export_is_refused(seen: dict[str, Any]) -> None:
    assert seen["publish_nothing"].returncode == 1
    assert "refused" in seen["publish_nothing"].stderr


def test_a_port_in_use_says_which_and_how_to_choose(tmp_path: Path) -> None:
    with socket.socket() as taken:
        base = free_base_port()
        taken.bind(("", base + 2))
        taken.listen()
        done = subprocess.run(
            [str(TIDEGATE), "demo", "--output", str(tmp_path), "--base-port", str(base)],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 1
    assert f"port {base + 2} (the HTTP endpoint) is in use" in done.stderr
    assert "--base-port" in done.stderr


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    demo = Demo(tmp_path)
    try:
        demo.wait_for("Ray runs", 180)
        assert of_demo(demo) != []
        demo.process.send_signal(signal.SIGINT)
        assert demo.process.wait(timeout=60) == 130, demo.said()
        assert of_demo(demo) == []
    finally:
        demo.end()
