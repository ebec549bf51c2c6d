"""What a step cost: pace, time by phase, memory."""

from __future__ import annotations

import resource
import time

import torch

from tidegate.train.config import RunConfig
from tidegate.train.flops import Pace, pace, peak_tflops_of, training_flops
from tidegate.train.parallel import World
from tidegate.train.progress import Phase, Progress
from tidegate.train.stages import Stage


class Meter:
    """Turns a step's seconds into a pace."""

    def __init__(self, config: RunConfig, stage: Stage, world: World) -> None:
        name = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else ""
        self._peak_tflops = config.peak_tflops or peak_tflops_of(name)
        self._image_flops = training_flops(config.model, stage.image, config.text)
        self._images, self._devices = stage.global_batch, world.size

    def pace(self, seconds: float) -> Pace:
        return pace(
            image_flops=self._image_flops,
            images=self._images,
            seconds=seconds,
            devices=self._devices,
            peak_tflops=self._peak_tflops,
        )


class Timed:
    """Passes on what a rank tells, and counts the seconds of each phase."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._phase, self._since_s = Phase.STARTING, time.perf_counter()
        self._seconds = dict.fromkeys(Phase, 0.0)
        self.stepped, self.speed = progress.stepped, progress.speed
        self.computed = progress.computed
        self.committed, self.stop_requested = progress.committed, progress.stop_requested

    def phase(self, phase: Phase) -> None:
        now_s = time.perf_counter()
        self._seconds[self._phase] += now_s - self._since_s
        self._phase, self._since_s = phase, now_s
        self._progress.phase(phase)

    def seconds(self) -> dict[str, float]:
        """Of each phase so far, since this process began its run."""
        now_s = time.perf_counter()
        self._seconds[self._phase] += now_s - self._since_s
        self._since_s = now_s
        return {str(phase): round(seconds, 3) for phase, seconds in self._seconds.items() if seconds}


def memory_bytes(device: torch.device) -> int:
    """The most that this rank has held so far: of the device's memory, or of the machine's where there is none."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
