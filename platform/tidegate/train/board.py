"""TensorBoard's files, written in a thread: a step waits for a queue's lock and no longer."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

_CLOSE_DEADLINE_S = 10.0

logger = logging.getLogger(__name__)


class Board:
    """Rank 0's. The library is imported, and a file made, with the first thing that is written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._todo: queue.SimpleQueue[Callable[[Any], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._first_step = 0

    def scalars(self, step: int, values: Mapping[str, float | None]) -> None:
        """One curve for each name; None is left out."""

        def write(writer: Any) -> None:
            for name, value in values.items():
                if value is not None:
                    writer.add_scalar(name, value, step)

        self._put(step, write)

    def image(self, step: int, name: str, pixels: np.ndarray) -> None:
        """(H, W) or (H, W, C) uint8."""
        self._put(step, lambda writer: writer.add_image(name, pixels, step, dataformats="HWC"[: pixels.ndim]))

    def close(self) -> None:
        """Write what is left."""
        if self._thread is not None:
            self._todo.put(None)
            self._thread.join(_CLOSE_DEADLINE_S)

    def _put(self, step: int, write: Callable[[Any], None]) -> None:
        if self._thread is None:
            self._first_step = step
            self._thread = threading.Thread(target=self._run, name="tensorboard", daemon=True)
            self._thread.start()
        self._todo.put(write)

    def _run(self) -> None:
        try:
            from tensorboardX import SummaryWriter

            # What an earlier generation wrote of steps that are done again is hidden.
            with SummaryWriter(str(self._folder), purge_step=self._first_step) as writer:
                while (write := self._todo.get()) is not None:
                    write(writer)
        except OSError as error:
            logger.warning("no more TensorBoard files: %s", error)  # the same numbers are in metrics.jsonl
