"""What a run and the process that sends its checkpoints tell each other. Pure."""

from __future__ import annotations

from tidegate.spec.policy import Model


class Errand(Model):
    """What the process is told when it starts."""

    checkpoints: str
    """The folder on disk."""
    store: str
    endpoint: str | None = None
    run: str
    generation: int
    keep: int | None = None
    """How many stay in the store; None: all."""
    attempts: int
    """How often a request is tried."""


class Delivered(Model):
    """How sending a checkpoint ended."""

    name: str
    error: str | None = None
    """Why it is not in the store."""
    sent_bytes: int = 0
    there_bytes: int = 0
    """What was there already."""
    took_s: float = 0.0
    removed: tuple[str, ...] = ()
    """Older ones that were deleted from the store."""
    not_removed: str | None = None
    """Why older ones could not be."""
