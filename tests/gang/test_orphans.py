"""Ray's trap of the setsid orphan, without a cluster: no child of a rank outlives the rank's agent, nor its generation.

`end_with_agent` (PR_SET_PDEATHSIG and a watcher) ends the ranks; their children hear nothing of it when they have a
session of their own, as torch.compile's workers do.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from alive import runs
from tidegate.processes import AGENT_MARK, carriers, end_carriers
from waiting import wait_until

AGENT = """
import json, multiprocessing, os, signal, subprocess, sys
from multiprocessing import forkserver
from tidegate.processes import AGENT_MARK, end_carriers, start_undertaker

def rank(name, pipe):
    from tidegate.gang.rank import end_with_agent
    end_with_agent()
    os.environ[AGENT_MARK] = name  # as rank_main does: the environment is the agent's
    pipe.send([os.getpid(), *(subprocess.Popen(["sleep", "300"], start_new_session=True).pid for _ in range(2))])
    signal.pause()

def tell(**what):
    print(json.dumps(what), flush=True)

if __name__ == "__main__":
    name = sys.argv[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tidegate.gang.rank"])
    forkserver.ensure_running()  # unmarked, like a node's warm one
    os.environ[AGENT_MARK] = name
    start_undertaker(AGENT_MARK, name)
    own = subprocess.Popen(["sleep", "300"])  # as a forkserver of its own would be
    here, there = context.Pipe()
    ranks = [context.Process(target=rank, args=(name, there)) for _ in range(2)]
    for one in ranks:
        one.start()
    tell(ranks=[here.recv() for _ in ranks], own=own.pid)
    for line in sys.stdin:  # told to end its generation
        for one in ranks:
            one.kill()
            one.join()
        tell(left=end_carriers(AGENT_MARK, name, spare_children_of=os.getpid()))
"""


class Agent:
    """A process that has two ranks; each has two children with sessions of their own."""

    def __init__(self, folder: Path) -> None:
        self.name = f"test-{os.getpid()}-{folder.name}"
        script = folder / "agent.py"
        script.write_text(AGENT, encoding="utf-8")
        self.process = subprocess.Popen(
            [sys.executable, str(script), self.name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        told = self.told()
        self.own: int = told["own"]
        self.ranks = [pids[0] for pids in told["ranks"]]
        self.orphans = [pid for pids in told["ranks"] for pid in pids[1:]]

    def told(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def end_generation(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write("end\n")
        self.process.stdin.flush()
        return self.told()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    one = Agent(tmp_path)
    try:
        assert len(one.orphans) == 4
        assert [os.getsid(pid) for pid in one.orphans] == one.orphans, "each leads a session of its own"
        yield one
    finally:
        one.process.kill()
        one.process.wait()
        end_carriers(AGENT_MARK, one.name)


def test_no_child_of_a_rank_outlives_a_killed_agent(agent: Agent) -> None:
    agent.process.send_signal(signal.SIGKILL)
    wait_until(lambda: not any(map(runs, agent.ranks)), 10, "the ranks end")
    wait_until(lambda: not any(map(runs, agent.orphans)), 10, "their children end")
    wait_until(lambda: not runs(agent.own), 10, "so does what the agent itself has started")
    assert carriers(AGENT_MARK, agent.name) == ()


def test_no_child_of_a_rank_outlives_its_generation(agent: Agent) -> None:
    """Not even those of a rank that was killed alone, whose process ids nobody knows any more."""
    os.kill(agent.ranks[0], signal.SIGKILL)
    wait_until(lambda: not runs(agent.ranks[0]), 10, "the rank ends")
    assert end_carriers(AGENT_MARK, f"{agent.name}-other") == ()
    assert all(map(runs, agent.orphans)), "nothing has ended them yet"
    assert agent.end_generation() == {"left": []}
    assert not any(map(runs, agent.orphans))
    assert runs(agent.own), "what the agent itself has started serves the next generation"
    assert agent.process.poll() is None
