"""Restore drills while a run trains: now and then, in a process of its own. Rank 0 starts them and tells of them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryFile
from typing import Self

from tidegate.train.drilled import Drilled
from tidegate.train.records import Records


class Drills:
    """Does nothing where `every_s` is None."""

    def __init__(
        self,
        every_s: float | None,
        run_dir: Path,
        records: Records,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._every_s, self._run_dir, self._records, self._clock = every_s, run_dir, records, clock
        self._due_s = clock() + every_s if every_s is not None else float("inf")
        self._something_new = False
        self._process: subprocess.Popen[bytes] | None = None
        self._files = ExitStack()
        """What the process writes to. Files, not pipes: nobody reads before it has ended."""

    def committed(self) -> None:
        """There is a checkpoint that was never drilled."""
        self._something_new = True

    def poll(self) -> None:
        """Start a drill that is due, tell of one that has ended. Costs microseconds."""
        if self._process is not None:
            if self._process.poll() is not None:
                self._tell(self._process.returncode)
        elif self._every_s is not None and self._something_new and self._clock() >= self._due_s:
            self._start(self._every_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        """One that is going on is of no use to anybody any more."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._files.close()

    def _start(self, every_s: float) -> None:
        self._due_s, self._something_new = self._clock() + every_s, False
        self._said, self._errors = (self._files.enter_context(file) for file in (TemporaryFile(), TemporaryFile()))  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tidegate.train.drill_process", str(self._run_dir)],
            stdin=subprocess.DEVNULL,
            stdout=self._said,
            stderr=self._errors,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        )

    def _tell(self, code: int) -> None:
        self._process = None
        with self._files:
            self._said.seek(0)
            results = [Drilled.model_validate_json(line) for line in self._said]
            self._errors.seek(0)
            last_words = " ".join(self._errors.read().decode(errors="replace").split())[-300:]
        for drilled in results:
            if drilled.problem is None:
                self._records.event("drill_passed", **drilled.model_dump(exclude={"good", "problem"}))
            elif drilled.good:
                self._records.event("drill_impossible", tier=drilled.tier, reason=drilled.problem)
            else:
                what = {"tier": drilled.tier, "checkpoint": drilled.name}
                self._records.event("drill_failed", **what, reason=f"{drilled.problem}; it is marked bad")
        if code:
            self._records.event("drill_impossible", reason=f"its process has ended with {code}: {last_words}")
