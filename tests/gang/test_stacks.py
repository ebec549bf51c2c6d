"""Stacks of processes that stand still: by py-spy from outside, or by themselves where that is refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tidegate.gang.stacks import innermost, py_spy, stacks_of
from waiting import wait_until

STUCK = """
import signal, sys
from tidegate.gang.stacks import answer_with_stack
answer_with_stack(sys.argv[1])
def waits_for_the_others():
    open(sys.argv[1] + ".up", "w").close()
    while True:
        signal.pause()
waits_for_the_others()
"""
REFUSES = "/bin/false"


@contextmanager
def stuck(path: Path) -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", STUCK, str(path)])
    try:
        wait_until(path.with_name(path.name + ".up").exists, 30, "it stands still")
        yield process.pid
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("stopped", [False, True], ids=["sleeps", "is stopped"])
def test_py_spy_sees_where_it_stands_also_when_it_runs_no_handler(tmp_path: Path, stopped: bool) -> None:
    with stuck(tmp_path / "stack") as pid:
        if stopped:
            os.kill(pid, signal.SIGSTOP)
        stack = stacks_of({pid: tmp_path / "stack"}, py_spy(), 20.0)[pid]
        assert "waits_for_the_others" in stack
        assert innermost(stack).startswith("waits_for_the_others")


@pytest.mark.parametrize("program", [REFUSES, None], ids=["refused", "not installed"])
def test_where_py_spy_can_not_look_the_process_tells_itself(tmp_path: Path, program: str | None) -> None:
    with stuck(tmp_path / "stack") as pid:
        stack = stacks_of({pid: tmp_path / "stack"}, program, 20.0)[pid]
        assert "waits_for_the_others" in stack
        assert "in waits_for_the_others" in innermost(stack)


def test_what_can_not_be_seen_at_all_says_why_and_holds_nobody_up(tmp_path: Path) -> None:
    with stuck(tmp_path / "stack") as pid:
        os.kill(pid, signal.SIGSTOP)
        gone = subprocess.Popen(["true"])
        gone.wait()
        stacks = stacks_of({pid: tmp_path / "stack", gone.pid: tmp_path / "gone"}, REFUSES, 0.5)
        assert stacks[pid].startswith("no stack: py-spy")
        assert "ended" in stacks[gone.pid]
