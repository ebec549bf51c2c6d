"""End what a process leaves behind when it is killed outright: children that gave themselves a session of their own.

A child started with `start_new_session=True` (torch.compile's workers are) gets no signal when its parent's process
group does, and survives its parent's SIGKILL: it would hold a GPU for ever. Its environment betrays it: whatever a
marked process executes inherits the mark. (One that was only forked shows the environment that its image began with.)
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

AGENT_MARK = "TIDEGATE_AGENT"
"""A node agent's name, in the environment of all that it starts."""

END_DEADLINE_S = 5.0
_LOOK_EVERY_S = 0.02
_PR_SET_PDEATHSIG = 1
_FIRST_REST_S, _LAST_REST_S = 0.5, 60.0
"""Between an undertaker's looks."""
_TRACKER = b"multiprocessing.resource_tracker"
"""Ends by itself once nothing needs it, and only then frees shared memory that was left: not to be killed."""


def end_with_parent() -> None:
    """Have this process killed when the thread that started it ends, as it does with its process.

    Raises:
        OSError: the kernel refuses.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG): this process would outlive its parent")


def carriers(variable: str, value: str) -> tuple[int, ...]:
    """Processes whose environment has `variable=value`, but for this one and for zombies."""
    wanted = f"{variable}={value}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # it has ended, or is not ours to read
            # A zombie has no environment.
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return tuple(found)


def family(variable: str, value: str) -> tuple[int, ...]:
    """Carriers and all that descends from them: who sets its own title, as Ray's workers do, shows no environment."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended
                parents[int(entry.name)] = int(_stat(int(entry.name))[1])
    found = set(carriers(variable, value))
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return tuple(sorted(pid for pid in found - {os.getpid()} if runs(pid)))


def end_family(variable: str, value: str) -> tuple[int, ...]:
    """SIGKILL carriers and descendants until none is left, as a loss of power would; those that are after
    `END_DEADLINE_S`."""
    return _end(lambda: family(variable, value), None)


def end_carriers(variable: str, value: str, *, spare_children_of: int | None = None) -> tuple[int, ...]:
    """SIGKILL all carriers until none is left; those that still are after `END_DEADLINE_S`.

    With `spare_children_of` that process's direct children stay. What a killed child of such a child leaves behind has
    another parent by then: init, or the nearest subreaper.
    """
    return _end(lambda: carriers(variable, value), spare_children_of)


def _end(find: Callable[[], Iterable[int]], spare_children_of: int | None) -> tuple[int, ...]:
    ends_s = time.monotonic() + END_DEADLINE_S
    ending: set[int] = set()
    while True:
        ending |= {pid for pid in find() if not _is_spared(pid, spare_children_of)}
        for pid in ending:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        # What was found stays known: an orphan is nobody's descendant any more, and one that is being torn down shows
        # no environment, and may still hold its GPU.
        ending = {pid for pid in ending if runs(pid)}
        if not ending or time.monotonic() > ends_s:
            return tuple(sorted(ending))
        time.sleep(_LOOK_EVERY_S)


def start_undertaker(variable: str, value: str) -> subprocess.Popen[bytes]:
    """A process that ends all carriers and what descends from them once the present one is gone, however it went, or
    closes its `stdin`."""
    return subprocess.Popen(
        [sys.executable, "-m", "tidegate.processes", variable, value],
        stdin=subprocess.PIPE,
        env={name: text for name, text in os.environ.items() if name != variable},
        # What kills its starter's process group must not kill it.
        start_new_session=True,
    )


@contextlib.contextmanager
def undertaken(variable: str, value: str) -> Iterator[None]:
    """Whatever this process starts inside carries the mark, and ends with the block, or with this process though it be
    killed outright."""
    os.environ[variable] = value
    undertaker = start_undertaker(variable, value)
    try:
        yield
    finally:
        assert undertaker.stdin is not None
        undertaker.stdin.close()
        undertaker.wait()


def _is_spared(pid: int, parent: int | None) -> bool:
    try:
        return _TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes() or parent == int(_stat(pid)[1])
    except OSError:
        return True  # it has ended meanwhile


def runs(pid: int) -> bool:
    """Zombies don't: all that they held is free."""
    return state_of(pid) not in ("", "Z", "X")


def state_of(pid: int) -> str:
    """The kernel's letter for the process's main thread; empty where it has ended."""
    try:
        return _stat(pid)[0]
    except OSError:
        return ""


def process_began_s() -> float:
    """When this process was started, by the wall clock."""
    ticks = int(_began(os.getpid()))
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


def program(pid: int) -> str:
    """Name of the file that the process executes; empty where it has ended."""
    try:
        return Path(os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0])).name
    except OSError:
        return ""


def _stat(pid: int) -> list[str]:
    """State, parent, … as proc(5) lists them, from the one after the command's name, which stands in brackets."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rsplit(")", 1)[1].split()


def main(variable: str, value: str) -> None:
    """Whoever has a title of its own is known by its parent alone, and that may die together with our starter: so the
    family is looked up while it lives too, seldom once it is old."""
    known: set[tuple[int, str]] = set()
    rest_s = _FIRST_REST_S
    # Readable when the last holder of the other end is gone.
    while not select.select([sys.stdin], [], [], rest_s)[0]:
        known = _living(known) | {(pid, began) for pid in family(variable, value) if (began := _began(pid))}
        rest_s = min(2 * rest_s, _LAST_REST_S)
    _end(lambda: {*family(variable, value), *(pid for pid, _ in _living(known))}, None)


def _living(known: set[tuple[int, str]]) -> set[tuple[int, str]]:
    """A number that another process bears by now is not the one that was known."""
    return {(pid, began) for pid, began in known if _began(pid) == began}


def _began(pid: int) -> str:
    """When it was started, in the kernel's ticks; empty where it has ended."""
    try:
        return _stat(pid)[19]
    except OSError:
        return ""


if __name__ == "__main__":
    main(*sys.argv[1:])
