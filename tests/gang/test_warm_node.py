"""A node's warm forkserver, without a cluster: one process keeps it, agents of another one fork from it.

The privates of `multiprocessing` that `gang/warm_node.py` sets are examined here: a Python that moves them breaks this.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from waiting import wait_until

KEEPER = """
import dataclasses, json, signal
from tidegate.gang.warm_node import WarmNode
if __name__ == "__main__":
    print(json.dumps(dataclasses.asdict(WarmNode().door())), flush=True)
    signal.pause()
"""
AGENT = """
import json, multiprocessing, os, signal, sys, time
from tidegate.gang.warm_node import Door, adopt, no_main_module
from tidegate.gang.rank import end_with_agent

def rank(cells, ends):
    end_with_agent()
    cells[0] = "torch" in sys.modules
    if ends:
        sys.exit(7)
    signal.pause()

if __name__ == "__main__":
    adopt(Door(**json.loads(sys.argv[1])))
    context = multiprocessing.get_context("forkserver")
    cells = context.RawArray("d", 1)
    began = time.monotonic()
    ends, stays = (context.Process(target=rank, args=(cells, ends)) for ends in (True, False))
    for one in (ends, stays):
        one.start()
    ends.join()
    print(json.dumps({"code": ends.exitcode, "pid": stays.pid, "warm": cells[0]}), flush=True)
    signal.pause()
"""


@pytest.fixture
def door(tmp_path: Path) -> Iterator[str]:
    with _started(tmp_path / "keeper.py", KEEPER) as keeper:
        assert keeper.stdout is not None
        yield keeper.stdout.readline()
        keeper.kill()


def test_agents_fork_from_it_one_after_another_and_their_ranks_die_with_them(tmp_path: Path, door: str) -> None:
    for _ in range(2):
        with _started(tmp_path / "agent.py", AGENT, door) as agent:
            assert agent.stdout is not None
            told: dict[str, Any] = json.loads(agent.stdout.readline())
            assert told["code"] == 7, "a rank's exit code is seen by its agent"
            assert told["warm"] == 1.0, "torch was not imported before the fork"
            rank = psutil.Process(told["pid"])
            forkserver = rank.parent()
            agent.send_signal(signal.SIGKILL)
        wait_until(lambda: not _runs(rank), 10, "the rank ends with its agent")  # noqa: B023
        assert forkserver is not None
        assert _runs(forkserver), "the next agent finds it warm"


def test_ranks_and_forkserver_end_with_its_keeper(tmp_path: Path) -> None:
    with _started(tmp_path / "keeper.py", KEEPER) as keeper:
        assert keeper.stdout is not None
        with _started(tmp_path / "agent.py", AGENT, keeper.stdout.readline()) as agent:
            assert agent.stdout is not None
            rank = psutil.Process(json.loads(agent.stdout.readline())["pid"])
            forkserver = rank.parent()
            assert forkserver is not None
            keeper.kill()
            wait_until(lambda: not _runs(forkserver) and not _runs(rank), 10, "forkserver and rank end")
            agent.kill()


def _started(script: Path, text: str, *arguments: str) -> subprocess.Popen[str]:
    script.write_text(text, encoding="utf-8")
    return subprocess.Popen([sys.executable, str(script), *arguments], stdout=subprocess.PIPE, text=True)


def _runs(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
