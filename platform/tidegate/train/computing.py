"""What a rank computes in a step, without its waits for others: what tells a slow GPU from one that waits for it."""

from __future__ import annotations

import statistics
import time
from collections import deque
from typing import Any

import torch
from diffusers.models.transformers.transformer_krea2 import Krea2TransformerBlock
from torch import nn

WINDOW_STEPS = 20
"""The median over so many steps is told: a pause for garbage or a checkpoint moves nothing (specification 4.4)."""


class Computing:
    """Times the network's blocks in their forward passes, between the gathering of their weights and the next wait.

    A whole step takes equally long on every rank, for all wait for the slowest. FSDP gathers a block's weights before
    the block's forward and frees them after it, by hooks; ours stand inside of them. On CUDA the time is the device's
    own (events on the stream that computes), read a step later: nothing waits for it. With tensor parallel ranks their
    sums are inside a block, so they show the slowest of their few.
    """

    def __init__(self, network: nn.Module, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds, self._began_s = 0.0, 0.0
        self._events: list[tuple[Any, Any]] = []
        self._used = 0
        self._steps: deque[float] = deque(maxlen=WINDOW_STEPS)
        for block in network.modules():
            if isinstance(block, Krea2TransformerBlock):
                block.register_forward_pre_hook(self._begin)
                block.register_forward_hook(self._end, prepend=True)

    def stepped(self) -> float | None:
        """Seconds per step, the median of the newest ones; called once at the end of each. None before the first."""
        if self._cuda:
            pairs = self._events[: self._used]
            if pairs:
                pairs[-1][1].synchronize()  # long done: the step's loss has been read on the host
            self._seconds = sum(begin.elapsed_time(end) for begin, end in pairs) / 1000.0
        if self._seconds > 0:
            self._steps.append(self._seconds)
        self._seconds, self._used = 0.0, 0
        return statistics.median(self._steps) if self._steps else None

    def _begin(self, _block: nn.Module, _inputs: object) -> None:
        if not torch.is_grad_enabled():  # a grid of samples, or its like
            return
        if not self._cuda:
            self._began_s = time.perf_counter()
            return
        if self._used == len(self._events):
            new_event: Any = torch.cuda.Event  # untyped in torch
            self._events.append((new_event(enable_timing=True), new_event(enable_timing=True)))
        self._events[self._used][0].record()

    def _end(self, _block: nn.Module, _inputs: object, _output: object) -> None:
        if not torch.is_grad_enabled():
            return
        if not self._cuda:
            self._seconds += time.perf_counter() - self._began_s
            return
        self._events[self._used][1].record()
        self._used += 1
