"""`tidegate up --head`, `--join`, changed settings and `down`, as a person types them."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml

from tidegate.arbiter.client import NAMESPACE, ArbiterClient
from tidegate.cluster.node import MARK
from tidegate.errors import NoArbiterError
from tidegate.ports import free_port
from tidegate.processes import carriers
from waiting import wait_until


class Machine:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.temp_dir = Path("/tmp") / f"tg{free_port()}"
        self.settings: dict[str, Any] = {
            "arbiter": {"state_dir": str(folder / "state")},
            "cluster": {
                "gcs_port": free_port(),
                "dashboard_port": free_port(),
                "dashboard_agent_port": free_port(),
                "temp_dir": str(self.temp_dir),
            },
        }

    def tidegate(self, *arguments: str, code: int = 0) -> str:
        policy = self.folder / "policy.yaml"
        policy.write_text(yaml.safe_dump(self.settings))
        done = subprocess.run(
            [str(Path(sys.executable).with_name("tidegate")), *arguments, "--policy", str(policy)],
            env={**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def marks(self) -> list[str]:
        files = (self.folder / "state" / "ray").glob("*.json")
        return [json.loads(file.read_text())["mark"] for file in files]


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    machine.tidegate("down")


def test_what_cannot_start_names_the_setting_and_leaves_nothing(machine: Machine) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        machine.settings["cluster"] |= {"dashboard_port": port}
        said = machine.tidegate("up", "--head", code=1)
        assert f"port {port} (cluster.dashboard_port) is in use" in said
        assert "set cluster.dashboard_port in policy.yaml" in said
    machine.settings["cluster"] |= {"redis": {"address": f"127.0.0.1:{free_port()}"}}
    assert "cluster.redis.address: nothing answers" in machine.tidegate("up", "--head", code=1)
    machine.settings["cluster"]["redis"] |= {"password_env": "NO_SUCH_VARIABLE"}
    assert "the environment has no NO_SUCH_VARIABLE" in machine.tidegate("up", "--head", code=1)
    machine.settings["cluster"] |= {"gcs_port": 12_000}
    assert "gcs_port 12000 lies among the ports of Ray's workers" in machine.tidegate("up", "--head", code=1)
    machine.settings["cluster"] |= {"gcs_port": free_port()}
    assert "--join: nothing answers" in machine.tidegate("up", "--join", f"127.0.0.1:{free_port()}", code=1)
    assert "--label 'x' is not KEY=VALUE" in machine.tidegate("up", "--join", "h:1", "--label", "x", code=1)
    assert machine.marks() == []
    assert "nothing that `tidegate up` started runs here" in machine.tidegate("down")


@pytest.mark.cluster
def test_head_join_changed_settings_and_down(machine: Machine) -> None:
    said = machine.tidegate("up", "--head")
    assert "head runs at" in said
    assert "arbiter runs\n" in said
    address = said.partition("head runs at ")[2].partition(",")[0]
    again = machine.tidegate("up", "--head")
    assert f"head runs already at {address}" in again
    assert "arbiter runs already" in again
    assert "warning" not in again

    joined = machine.tidegate("up", "--join", address, "--gpus", "2", "--label", "tidegate/domain=rack-7")
    assert f"this node has joined {address}" in joined
    assert f"this node belongs to {address} already" in machine.tidegate(
        "up", "--join", address, "--gpus", "2", "--label", "tidegate/domain=rack-7"
    )
    ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
    try:
        (worker,) = [node for node in ray.nodes() if node["Resources"].get("GPU")]
        assert worker["Labels"]["tidegate/domain"] == "rack-7"
        assert worker["Resources"]["GPU"] == 2
        wait_until(agent_reports, 30, "the agent of the node that joined to report")
    finally:
        ray.shutdown()

    machine.settings["health"] = {"period_s": 0.5}
    machine.settings["cluster"]["health_check_failures"] = 4
    changed = machine.tidegate("up", "--head")
    assert "RAY_health_check_failure_threshold is 3 here, policy.yaml now says 4" in changed
    assert "other settings than" in changed
    assert "cluster.health_check_failures, health.period_s" in changed
    assert "to apply health: `tidegate up --apply`" in changed
    assert "to apply cluster: `tidegate down` and `tidegate up` on each machine" in changed
    assert "started anew" in machine.tidegate("up", "--address", address, "--apply")

    marks = machine.marks()
    assert len(marks) == 2
    taken = machine.tidegate("down", "--apps", "--address", address)
    assert "3 actors of the control plane are ended" in taken
    assert all(carriers(MARK, mark) for mark in marks), "Ray itself was to stay"
    down = machine.tidegate("down")
    assert f"the head of {address} is stopped" in down
    assert not any(carriers(MARK, mark) for mark in marks)
    assert machine.marks() == []


def agent_reports() -> bool:
    try:
        nodes = asyncio.run(ArbiterClient().status())["nodes"]
    except NoArbiterError:
        return False
    return [node["source_error"] == "no agent reports" for node in nodes] == [False]
