"""Find the newest checkpoint that verifies, and read it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from tidegate.checkpoint.files import file_problem
from tidegate.checkpoint.manifest import MANIFEST, Manifest, parse_manifest, parse_name
from tidegate.checkpoint.marks import refuse_bad
from tidegate.checkpoint.shards import Part, read_parts, whole_shapes
from tidegate.errors import CheckpointError

MODEL = "model."
"""Prefix of the weights' names in a checkpoint."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    folder: Path
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Skipped:
    name: str
    why: str

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"


@dataclass(frozen=True, slots=True)
class Found:
    checkpoint: Checkpoint | None
    skipped: tuple[Skipped, ...]
    """Newer ones that are not to be trusted, each with the reason."""


def newest_good(checkpoints: Path) -> Found:
    """The newest checkpoint whose manifest is there and whose files have the sizes and hashes that it says."""
    names = [path.name for path in checkpoints.iterdir()] if checkpoints.is_dir() else []
    parsed = sorted(((parse_name(name), name) for name in names if parse_name(name) is not None), reverse=True)
    skipped: list[Skipped] = []
    for _, name in parsed:
        try:
            return Found(Checkpoint(checkpoints / name, verified(checkpoints / name)), tuple(skipped))
        except CheckpointError as error:
            skipped.append(Skipped(name, str(error)))
    return Found(None, tuple(skipped))


def newest_good_for_all(checkpoints: Path, group: dist.ProcessGroup) -> Found:
    """As `newest_good`, decided by rank 0 for all: ranks that each looked for themselves could disagree on a network
    file system, and wait for each other for ever."""
    answer: list[Found | None] = [newest_good(checkpoints) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(answer, src=0, group=group)
    found = answer[0]
    if found is None:
        raise CheckpointError(f"{checkpoints}: rank 0 sent no answer")
    return found


def verified(folder: Path) -> Manifest:
    """The manifest of a checkpoint after checking every file against it.

    Raises:
        CheckpointError: with the first thing that is wrong.
    """
    try:
        data = (folder / MANIFEST).read_bytes()
    except FileNotFoundError:
        raise CheckpointError("never committed: no manifest") from None
    except OSError as error:
        raise CheckpointError(f"{MANIFEST}: {error.strerror}") from None
    manifest = parse_manifest(data)
    if parse_name(folder.name) != (manifest.step, manifest.generation):
        raise CheckpointError(f"{MANIFEST} is of step {manifest.step}, generation {manifest.generation}")
    refuse_bad(folder)
    for file in manifest.files:
        problem = file_problem(folder, file)
        if problem is not None:
            raise CheckpointError(problem)
    return manifest


def load(checkpoint: Checkpoint, parts: list[Part]) -> None:
    """Fill `parts` in place. Every rank does so on its own.

    Raises:
        CheckpointError: the checkpoint is of another network.
    """
    read_parts(checkpoint.folder, [file.name for file in checkpoint.manifest.files], parts)


def full_model_weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The whole weights on the CPU, without any process group."""
    files = [file.name for file in checkpoint.manifest.files]
    parts = [
        Part(name, torch.empty(shape, dtype=dtype), shape, (0,) * len(shape))
        for name, (shape, dtype) in whole_shapes(checkpoint.folder, files).items()
        if name.startswith(MODEL)
    ]
    read_parts(checkpoint.folder, files, parts)
    return {part.name.removeprefix(MODEL): part.local for part in parts}
