"""What a rank tells whoever watches it, and the one thing it asks."""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol


class Phase(StrEnum):
    STARTING = "starting"
    RENDEZVOUS = "rendezvous"
    RESTORING = "restoring"
    WARMING = "warming"
    """The first steps of a process or of a stage: kernels are compiled, and nobody knows yet how long a step takes."""
    STEPPING = "stepping"
    SAVING = "saving"
    """Blocked by a save: staging, or waiting for the one before."""
    SAMPLING = "sampling"
    """Blocked by a grid of samples."""
    EXPORTING = "exporting"
    DONE = "done"


class Progress(Protocol):
    """Called from the rank's main thread, `stepped`, `speed`, `computed` and `stop_requested` in every step: they
    must cost microseconds."""

    def phase(self, phase: Phase) -> None: ...

    def stepped(self, step: int, loss: float) -> None:
        """`step` steps are done, the loss is the global batch's mean (NaN where the step was skipped)."""
        ...

    def speed(self, images_per_s: float, mfu: float | None) -> None:
        """Of the newest step: of the whole run, and what share of its devices' peak it used, where that is known."""
        ...

    def computed(self, seconds: float) -> None:
        """What this rank computed in a step before its collectives, the median of the newest steps."""
        ...

    def committed(self, step: int) -> None:
        """A checkpoint of `step` exists. Rank 0 alone knows, and is told a step late at most."""
        ...

    def stop_requested(self) -> bool:
        """Whether to save and leave. One rank's yes is enough: it is OR-ed over all of them, so all leave together."""
        ...


class NullProgress:
    """Nobody watches."""

    def phase(self, phase: Phase) -> None: ...

    def stepped(self, step: int, loss: float) -> None: ...

    def speed(self, images_per_s: float, mfu: float | None) -> None: ...

    def computed(self, seconds: float) -> None: ...

    def committed(self, step: int) -> None: ...

    def stop_requested(self) -> bool:
        return False
