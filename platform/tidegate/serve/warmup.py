"""Before a model is ready: each of its fixed shapes is run, so that nothing is compiled or allocated while a client
waits, and its time and memory are measured, which decides what is stepped together and what is refused."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from tidegate.serve.batching import buckets, paying
from tidegate.serve.fitting import Room
from tidegate.serve.painters.base import Painter, Stepped, Wish
from tidegate.serve.work import Size

_TIMED = 3
"""Steps that are timed in each shape; the fastest counts, since whatever disturbs makes slower."""

_LOG = logging.getLogger("ray.serve")


@dataclass(frozen=True, slots=True)
class Warm:
    buckets: Mapping[Size, Mapping[int, float]]
    """For each size that fits: pictures to step at once, and the seconds of one such step."""
    unfit: Mapping[Size, str]
    """Why the others don't."""


def warm_up(painter: Painter, batch_max: int, room: Room, device: torch.device, before: Warm | None = None) -> Warm:
    """Run and measure every shape. With `before`, of a model of the same shapes, they are run only: a device that
    serves meanwhile would be measured wrongly."""
    used: dict[Size, dict[int, float]] = {}
    unfit: dict[Size, str] = {} if before is None else dict(before.unfit)
    for size in sorted(painter.sizes, key=lambda size: size.width * size.height):
        if before is not None:
            for pictures in before.buckets.get(size, ()):
                _shape(painter, size, pictures)()
            continue
        step_s: dict[int, float] = {}
        for pictures in buckets(batch_max):
            why = room.problem(size, pictures) or _measure(painter, size, pictures, room, device, step_s)
            if why is not None:
                if pictures == 1:
                    unfit[size] = why
                break
        if step_s:
            used[size] = paying(step_s)
            shown = ", ".join(f"{count}: {seconds * 1e3:.1f} ms" for count, seconds in step_s.items())
            _LOG.info("%s: a step of %s; steps are taken by %s", size, shown, list(used[size]))
    return before or Warm(used, unfit)


def _measure(
    painter: Painter, size: Size, pictures: int, room: Room, device: torch.device, step_s: dict[int, float]
) -> str | None:
    """Run one shape, and note its time and memory; why it doesn't fit, where the device says so itself."""
    run = _shape(painter, size, pictures)
    try:
        taken_bytes = _peak_bytes(device, run)
    except torch.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        return str(error)[:200]
    room.measured(size, pictures, taken_bytes)
    times = []
    for _ in range(_TIMED):
        began_s = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began_s)
    step_s[pictures] = min(times)
    return None


def _shape(painter: Painter, size: Size, pictures: int) -> Callable[[], None]:
    """One step of so many pictures; the first call makes them whole too."""
    wishes = [Wish(prompt="warm", seed=number, size=size, steps=2) for number in range(pictures)]
    if not isinstance(painter, Stepped):

        def paint() -> None:
            painter.paint(wishes, lambda done, steps, unfinished: None)

        return paint
    drawings = [painter.begin(wish) for wish in wishes]

    def step() -> None:
        whole = drawings[0].done == 0
        for drawing in drawings:
            drawing.done = 0
        painter.step(drawings, pictures)
        if whole:
            painter.picture(drawings[0])

    return step


def held_bytes(device: torch.device) -> int:
    """What this process holds: on the device, or in memory where the CPU is it."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return _status_bytes("VmRSS")


def limit_bytes(device: torch.device, wanted: int | None) -> int | None:
    """What it may hold: as set, else all that a GPU has; a CPU's memory is other people's too, so none is assumed."""
    if wanted is not None or device.type != "cuda":
        return wanted
    return torch.cuda.get_device_properties(device).total_memory


def _peak_bytes(device: torch.device, run: Callable[[], None]) -> int:
    """What `run` takes at its peak, beyond what was taken before."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before_bytes = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before_bytes
    # The process's own peak says little: its allocator has room left over from before.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    results = seen.profiler.kineto_results if seen.profiler else None
    changes = [event for event in results.events() if event.name() == "[memory]"] if results else []
    changes.sort(key=lambda event: event.start_ns())
    return int(max(accumulate((event.nbytes() for event in changes), initial=0)))


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
