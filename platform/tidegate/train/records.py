"""A run's own files: one JSON object a line, only ever appended to, written by rank 0."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TextIO

from tidegate.checkpoint.disk import Outcome

METRICS = "metrics.jsonl"
"""A line a step."""
CHECKPOINTS = "checkpoints.jsonl"
"""A line a commit."""
EVENTS = "events.jsonl"
"""What else happened: restored, checkpoint_skipped, resumed_differently, save_failed, step_skipped, rolled_back,
exported. Of the object store: uploaded, upload_failed, upload_left, store_not_pruned. Of restore drills: drill_passed,
drill_failed, drill_impossible."""

logger = logging.getLogger(__name__)


class Records:
    """Writes on rank 0, does nothing on the others. A context manager."""

    def __init__(
        self,
        run_dir: Path,
        *,
        writes: bool,
        world_size: int,
        generation: int,
        log_every_steps: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._same = {"world_size": world_size, "generation": generation}
        self._log_every_steps, self._clock = log_every_steps, clock
        self._files: dict[str, TextIO] = {}
        if writes:
            run_dir.mkdir(parents=True, exist_ok=True)
            # Line buffered: a killed rank loses no line and leaves no half one.
            names = (METRICS, CHECKPOINTS, EVENTS)
            self._files = {name: (run_dir / name).open("a", buffering=1, encoding="utf-8") for name in names}

    def __enter__(self) -> Records:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files.values():
            file.close()

    def step(self, step: int, loss: float, grad_norm: float, step_s: float) -> None:
        numbers = {"loss": _number(loss), "grad_norm": _number(grad_norm), "step_s": round(step_s, 6)}
        self._write(METRICS, {"step": step, **numbers})
        if self._files and step % self._log_every_steps == 0:
            logger.info("step %d: loss %.4f, %.0f ms", step, loss, step_s * 1000)

    def skipped_step(
        self, step: int, loss: float, grad_norm: float, bad_ranks: tuple[int, ...], samples: list[int]
    ) -> None:
        """No rank changed its weights in `step`, because a loss or the gradient was not finite."""
        who = f"loss of rank {', '.join(map(str, bad_ranks))}" if bad_ranks else f"loss {loss}, gradient {grad_norm}"
        self.event("step_skipped", step=step, bad_ranks=list(bad_ranks), reason=f"not finite: {who}", samples=samples)

    def commit(self, outcome: Outcome) -> None:
        took = {"stall_s": round(outcome.stall_s, 6), "commit_s": round(outcome.commit_s, 6)}
        self._write(CHECKPOINTS, {"step": outcome.step, **took, "bytes": outcome.bytes})

    def event(self, kind: str, **data: object) -> None:
        self._write(EVENTS, {"kind": kind, **data})
        if self._files:
            level = logging.WARNING if "reason" in data else logging.INFO
            logger.log(level, "%s: %s", kind, ", ".join(f"{name} {value}" for name, value in data.items()))

    def _write(self, name: str, line: dict[str, object]) -> None:
        if name in self._files:
            self._files[name].write(json.dumps({"at_s": round(self._clock(), 3), **line, **self._same}) + "\n")


def _number(value: float) -> float | None:
    """JSON knows no NaN."""
    return round(value, 6) if math.isfinite(value) else None
