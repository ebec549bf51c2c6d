"""The run's side of sending checkpoints to the object store: hand over, and hear how it went. It never waits."""

from __future__ import annotations

import contextlib
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from tidegate.checkpoint.errand import Delivered, Errand
from tidegate.checkpoint.marks import Mark

_LOOK_EVERY_S = 0.2


class Courier:
    """Owns the process of `sending.py`, which it starts again when it has died."""

    def __init__(self, errand: Errand) -> None:
        self._errand = errand
        self._heard: queue.SimpleQueue[Delivered | None] = queue.SimpleQueue()
        self._under_way: list[str] = []
        """Handed over, in order, and not heard of."""
        self._process: subprocess.Popen[str] | None = None
        self._start()

    @property
    def under_way(self) -> tuple[str, ...]:
        return tuple(self._under_way)

    def offer(self, name: str) -> None:
        """Have a committed checkpoint sent, unless a newer one is offered before its turn."""
        if self._process is None:
            self._start()
        assert self._process is not None
        assert self._process.stdin is not None
        self._under_way.append(name)
        # At once, or retention might delete it before the process hears of it. Not synced: that would take a step's
        # time, and a mark that a crash loses costs nothing but a sending.
        with contextlib.suppress(OSError):
            (Path(self._errand.checkpoints) / name / Mark.SENDING).touch()
        with contextlib.suppress(BrokenPipeError):  # it has died, which `poll` tells
            self._process.stdin.write(name + "\n")
            self._process.stdin.flush()

    def poll(self) -> list[Delivered]:
        """How sendings have ended since the last call."""
        news = []
        with contextlib.suppress(queue.Empty):
            while True:
                news += self._told(self._heard.get_nowait())
        return news

    def wait(self, deadline_s: float, meanwhile: Callable[[], None] = lambda: None) -> list[Delivered]:
        """Until nothing is under way, or for `deadline_s` seconds; what was heard. `meanwhile` is called often."""
        ends_s = time.monotonic() + deadline_s
        news = self.poll()
        while self._under_way and (left_s := ends_s - time.monotonic()) > 0:
            meanwhile()
            with contextlib.suppress(queue.Empty):
                news += self._told(self._heard.get(timeout=min(left_s, _LOOK_EVERY_S)))
        return news

    def close(self) -> None:
        """End it, in the middle of a sending too: the next one goes on from there."""
        if self._process is not None:
            self._end(self._process)

    def _told(self, heard: Delivered | None) -> list[Delivered]:
        if heard is not None:
            # Whoever was handed over before this one was left out for it.
            if heard.name in self._under_way:
                del self._under_way[: self._under_way.index(heard.name) + 1]
            return [heard]
        assert self._process is not None
        code = self._end(self._process)
        lost, self._under_way = self._under_way[-1:], []
        return [Delivered(name=name, error=f"the process that sends it has ended with {code}") for name in lost]

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tidegate.checkpoint.sending", self._errand.model_dump_json()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        threading.Thread(target=self._hear, args=(self._process.stdout,), daemon=True).start()

    def _end(self, process: subprocess.Popen[str]) -> int:
        self._process = None
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        return process.wait()

    def _hear(self, out: IO[str]) -> None:
        with out:
            for line in out:
                self._heard.put(Delivered.model_validate_json(line))
        self._heard.put(None)
