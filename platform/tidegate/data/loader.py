"""Batches for one rank, read ahead by threads or by processes. The position is the step and nothing else."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tidegate.data.buckets import Size
from tidegate.data.dataset import Dataset
from tidegate.data.order import share_range
from tidegate.data.states import Halves


@dataclass(frozen=True, slots=True)
class Batch:
    """One rank's part of the global batch of `step`."""

    step: int
    """From 0."""
    size: Size
    """Of its images, in pixels."""
    pixels: Tensor | None
    """(B, C, H, W) float32 in [-1, 1]; None where there are latents."""
    latents: Tensor | None
    """(B, C, H/factor, W/factor) float16, as the autoencoder gave them."""
    text_states: Tensor | None
    """(B, length, layers, width) float16, zeros behind a caption's tokens; None where the data set has none."""
    text_mask: Tensor | None
    """(B, length) bool: the real tokens."""
    captions: tuple[str, ...]
    short_captions: tuple[str, ...]
    """Empty where a sample has none."""
    ids: tuple[int, ...]
    positions: range
    """Where these samples stand in the global batch."""


class Loader:
    """Iterates over one rank's batches from `start_step` to `end_step`, in order.

    A context manager: leaving it ends its threads or processes."""

    def __init__(
        self,
        data: Dataset,
        *,
        seed: int,
        global_batch: int,
        rank: int,
        world_size: int,
        start_step: int,
        end_step: int,
        workers: int = 1,
        kind: Literal["thread", "process"] = "thread",
        ahead: int = 2,
    ) -> None:
        """
        Args:
            workers: threads or processes that read ahead. Decoding runs in threads side by side; processes are for what
                holds Python's lock.
            ahead: batches that each worker may be ahead of the one that is asked for.
        """
        self._data, self._seed, self._global_batch = data, seed, global_batch
        self._positions = share_range(global_batch, rank, world_size)
        self._steps = range(start_step, end_step)
        self._workers, self._kind, self._ahead = workers, kind, ahead
        self._open = ExitStack()

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def __iter__(self) -> Iterator[Batch]:
        return self._by_threads() if self._kind == "thread" else self._by_processes()

    def batch(self, step: int) -> Batch:
        """This rank's part of the global batch of `step`."""
        ids = self._data.ids(self._seed, step, self._global_batch)[self._positions.start : self._positions.stop]
        rows = self._data.rows(ids)
        states = mask = None
        if rows.text_states is not None and self._data.text_length is not None:
            states, mask = padded(rows.text_states, self._data.text_length)
        return Batch(
            step=step,
            size=rows.size,
            pixels=None if rows.pixels is None else _floats(torch.from_numpy(rows.pixels)),
            latents=None if rows.latents is None else torch.from_numpy(rows.latents),
            text_states=states,
            text_mask=mask,
            captions=tuple(captions.long for captions in rows.captions),
            short_captions=tuple(captions.short for captions in rows.captions),
            ids=tuple(ids.tolist()),
            positions=self._positions,
        )

    def _by_threads(self) -> Iterator[Batch]:
        pool = ThreadPoolExecutor(self._workers, thread_name_prefix="read-ahead")
        self._open.callback(pool.shutdown, cancel_futures=True)
        steps, waiting = iter(self._steps), deque[Future[Batch]]()
        while True:
            while len(waiting) < self._workers * self._ahead and (step := next(steps, None)) is not None:
                waiting.append(pool.submit(self.batch, step))
            if not waiting:
                return
            yield waiting.popleft().result()

    def _by_processes(self) -> Iterator[Batch]:
        # torch's own: its workers end with their parent, and hand tensors over in shared memory.
        batches = DataLoader(
            _Steps(self),
            batch_size=None,
            sampler=self._steps,
            num_workers=self._workers,
            prefetch_factor=self._ahead,
            collate_fn=_as_it_is,
            multiprocessing_context="forkserver",
        )
        yield from batches


def padded(states: Sequence[Halves], length: int) -> tuple[Tensor, Tensor]:
    """States (tokens, layers, width) of several captions, longer ones cut, as (B, length, layers, width) and a mask."""
    whole = np.zeros((len(states), length, *states[0].shape[1:]), np.float16)
    mask = np.zeros((len(states), length), bool)
    for place, one in enumerate(states):
        tokens = min(length, len(one))
        whole[place, :tokens], mask[place, :tokens] = one[:tokens], True
    return torch.from_numpy(whole), torch.from_numpy(mask)


def _floats(pixels: Tensor) -> Tensor:
    """(B, H, W) or (B, H, W, C) bytes -> (B, C, H, W) in [-1, 1]."""
    # Turned while it is bytes, a quarter of what it will be.
    turned = pixels[:, None] if pixels.dim() == 3 else pixels.permute(0, 3, 1, 2).contiguous()
    return turned.float().div_(127.5).sub_(1)


class _Steps(torch.utils.data.Dataset[Any]):
    """A loader by step, without what only the parent has."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __getitem__(self, step: int) -> Batch:
        return self._loader.batch(step)


def _as_it_is(batch: Any) -> Any:
    return batch
