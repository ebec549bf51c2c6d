"""A run's own files: one JSON object a line, only ever appended to, written by rank 0."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TextIO

import numpy as np
from PIL import Image

from tidegate.checkpoint.disk import Outcome
from tidegate.train.board import Board
from tidegate.train.flops import Pace

METRICS = "metrics.jsonl"
"""A line a step."""
CHECKPOINTS = "checkpoints.jsonl"
"""A line a commit."""
EVENTS = "events.jsonl"
"""What else happened: restored, checkpoint_skipped, resumed_differently, save_failed, step_skipped, rolled_back,
jumped_after_resume, level_shift, pinned, not_pinned, stage, sampled, sample_failed, exported; of the object store:
uploaded, upload_failed, upload_left, store_not_pruned."""

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
        tensorboard: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._same = {"world_size": world_size, "generation": generation}
        self._run_dir, self._log_every_steps, self._clock = run_dir, log_every_steps, clock
        self._files: dict[str, TextIO] = {}
        self._board = Board(run_dir / "tensorboard") if writes and tensorboard else None
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
        if self._board is not None:
            self._board.close()

    def step(
        self,
        step: int,
        loss: float,
        grad_norm: float,
        *,
        rate: float,
        step_s: float,
        input_s: float,
        pace: Pace,
        more: Callable[[], Mapping[str, object]],
    ) -> None:
        """A line. `rate` is the learning rate; `more` is asked only where it is time for a log line too: what there is
        no need to know of every step."""
        if not self._files:
            return
        numbers = {
            "loss": _number(loss),
            "grad_norm": _number(grad_norm),
            "rate": rate,
            "step_s": round(step_s, 6),
            "input_s": round(input_s, 6),
            "images_per_s": round(pace.images_per_s, 3),
            "tflops": float(f"{pace.tflops:.4g}"),
            "mfu": _number(pace.mfu) if pace.mfu is not None else None,
        }
        if step % self._log_every_steps:
            self._write(METRICS, {"step": step, **numbers})
            return
        self._write(METRICS, {"step": step, **numbers, **more()})
        logger.info("step %d: loss %.4f, %.0f ms, %.1f images/s", step, loss, step_s * 1000, pace.images_per_s)
        if self._board is not None:
            self._board.scalars(step, {f"train/{name}": value for name, value in numbers.items()})

    def picture(self, step: int, pixels: np.ndarray) -> None:
        """A grid of samples, (H, W) or (H, W, C) uint8, as `samples/step-00000100.png` and for TensorBoard."""
        path = self._run_dir / "samples" / f"step-{step:08d}.png"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path)
            self.event("sampled", step=step, file=str(path))
        except OSError as error:
            self.event("sample_failed", step=step, reason=str(error))
        if self._board is not None:
            self._board.image(step, "samples", pixels)

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
