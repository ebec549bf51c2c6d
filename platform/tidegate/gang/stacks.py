"""Where a hung rank stands: its stack from outside by py-spy, or, where ptrace is refused, by its own faulthandler.

A rank that is stopped or waits in a driver runs no handler, so py-spy goes first: it only reads the process's memory.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from tidegate.gang.plan import Stacks

DEADLINE_S = 3.0
"""For all ranks of a node together: the next generation waits for it."""
MOST_CHARACTERS = 8_000
"""Of one rank's stack; the innermost frames stand first."""
MOST_STACKS = 16
"""Of one node, in the arbiter's journal; all of them lie in the run's folder."""
_SIGNAL = signal.SIGUSR2
_LOOK_EVERY_S = 0.02


def answer_with_stack(path: str) -> None:
    """In a rank, once: on the signal, write all threads' stacks into `path`. Works while Python's lock is held."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    faulthandler.register(_SIGNAL, file=file, all_threads=True)


def py_spy() -> str | None:
    return shutil.which("py-spy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}")


def stacks_of(paths: Mapping[int, Path], program: str | None, deadline_s: float = DEADLINE_S) -> dict[int, str]:
    """Stack by process id, of processes that called `answer_with_stack` with their path; why there is none, if so.

    `program`: py-spy's path, None where it is not installed.
    """
    ends_s = time.monotonic() + deadline_s
    asked = {pid: _ask(program, pid) for pid in paths} if program is not None else {}
    said = {pid: _answer(process, ends_s) for pid, process in asked.items()}
    refused = {pid: said.get(pid, (None, "py-spy is not installed"))[1] for pid in paths if not said.get(pid, ("",))[0]}
    own = _own_stacks({pid: paths[pid] for pid in refused}, max(ends_s, time.monotonic() + 0.5))
    found = {pid: text for pid, (text, _) in said.items() if text}
    found |= {pid: own.get(pid) or f"no stack: {why}" for pid, why in refused.items()}
    return {pid: text[:MOST_CHARACTERS] for pid, text in found.items()}


def innermost(text: str) -> str:
    """The main thread's innermost frame, for a line in a journal; the text's first line where it has none."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for place, line in enumerate(lines):
        if line.startswith("Thread") and "MainThread" in line and place + 1 < len(lines):
            return lines[place + 1]
    # faulthandler numbers its threads and does not name them: the main one comes last.
    heads = [place for place, line in enumerate(lines) if line.endswith("(most recent call first):")]
    if heads and heads[-1] + 1 < len(lines):
        return lines[heads[-1] + 1]
    return lines[0] if lines else ""


def write_stacks(folder: Path, told: Stacks) -> str:
    """One file a rank; where they stood, for a line in a journal."""
    folder.mkdir(parents=True, exist_ok=True)
    for slot, text in told.ranks:
        (folder / f"generation-{told.generation}-rank-{slot.rank}.txt").write_text(text, encoding="utf-8")
    stood = "; ".join(f"rank {slot.rank} in {innermost(text)}" for slot, text in told.ranks[:MOST_STACKS])
    return f"generation {told.generation} hung; on {told.node[:12]} {stood}"


def _ask(program: str, pid: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [program, "dump", "--nonblocking", "--pid", str(pid)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _answer(process: subprocess.Popen[str], ends_s: float) -> tuple[str, str]:
    """The stack, and why there is none."""
    try:
        out, error = process.communicate(timeout=max(0.05, ends_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return "", "py-spy took too long"
    return (out, "") if process.returncode == 0 and "Thread" in out else ("", f"py-spy: {error.strip()[-300:]}")


def _own_stacks(paths: Mapping[int, Path], ends_s: float) -> dict[int, str]:
    found: dict[int, str] = {}
    for pid in paths:
        try:
            os.kill(pid, _SIGNAL)
        except ProcessLookupError:
            found[pid] = "no stack: the process has ended"
    while len(found) < len(paths) and time.monotonic() < ends_s:
        time.sleep(_LOOK_EVERY_S)
        for pid, path in paths.items():
            text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
            if pid not in found and text.endswith("\n"):
                found[pid] = text
    return found
