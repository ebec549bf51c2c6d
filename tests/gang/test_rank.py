"""A rank's process, without its loop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from alive import runs
from waiting import wait_until

AGENT = """
import multiprocessing, signal

def rank():
    from tidegate.gang.rank import end_with_agent
    end_with_agent()
    signal.pause()

if __name__ == "__main__":
    ranks = [multiprocessing.get_context("forkserver").Process(target=rank) for _ in range(2)]
    for one in ranks:
        one.start()
    print(*(one.pid for one in ranks), flush=True)
    signal.pause()
"""


def test_no_rank_outlives_a_killed_agent(tmp_path: Path) -> None:
    """Two ranks: each holds the pipe that keeps their forkserver alive, so neither may wait for the other."""
    script = tmp_path / "agent.py"
    script.write_text(AGENT, encoding="utf-8")
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        pids = [int(pid) for pid in agent.stdout.readline().split()]
        agent.send_signal(signal.SIGKILL)
    assert len(pids) == 2
    try:
        wait_until(lambda: not any(runs(pid) for pid in pids), 30, "both ranks end")
    finally:
        for pid in filter(runs, pids):
            os.kill(pid, signal.SIGKILL)
