"""How a replica runs its model. Pure: whoever builds the application needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.serve.work import Size
from tidegate.train.config import Compile


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How a replica runs its model; `serve_apps/images.py` sets it."""

    threads: int = 1
    """CPU threads that torch may use."""
    sizes: tuple[Size, ...] = ()
    """What is made, the first by default; none: what the folder's recipe or pipeline says."""
    batch_max: int = 4
    """Pictures that may be stepped at once; fewer where warm-up finds that more don't pay."""
    compile: Compile = "none"
    """Have torch compile the network for each fixed shape, before the replica is ready."""
    memory_bytes: int | None = None
    """What the engine may take of the device; None: all that a GPU has, no limit on a CPU."""
    embeddings_bytes: int = 256 * 2**20
    """Of encoded texts that are kept."""
    text_length: int = 512
    """Tokens of text that a Krea 2 pipeline without a recipe is given."""
