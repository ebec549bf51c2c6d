"""What makes a folder a checkpoint: the manifest, written last and renamed into place.

    step-00000200.g3/                 200 steps done, saved by generation 3
      shard-00001-model-…safetensors  rank 0's part, in the layout of DCP's HuggingFaceStorageWriter
      …
      manifest.json                   all the others with size and hash; and the step, generation, position in the data

A generation in the name keeps a late writer of an old generation out of the new one's folders.
"""

from __future__ import annotations

import re
from typing import Literal

from pydantic import ValidationError

from tidegate.errors import CheckpointError
from tidegate.spec.policy import Model

MANIFEST = "manifest.json"

_NAME = re.compile(r"step-(\d{8,})\.g(\d+)")


class ShardSeen(Model):
    """One rank's file as it was when the checkpoint was committed."""

    name: str
    bytes: int
    header_bytes: int
    xxh3_128: str
    """Of the header, in hex. The header holds the hashes of all that follows it (see `layout.py`)."""


class Manifest(Model):
    format: Literal[2] = 2
    run: str
    generation: int
    step: int
    """Steps done; also the position in the data, whose order depends on the step alone."""
    updates: int
    """Steps that changed the weights: without those skipped for their loss, or undone by a roll-back."""
    rollbacks: int = 0
    """How often the run has gone back to a checkpoint because of its loss."""
    usual_loss: float | None = None
    """Mean of the newest steps' losses: what the next ones should be near; None before there are any."""
    seed: int
    """Of all randomness there is: weights, order, noise and times are functions of it and the step."""
    global_batch: int
    dataset: str
    """Fingerprint of the data's index."""
    world_size: int
    at_s: float = 0.0
    """When it was committed."""
    files: tuple[ShardSeen, ...] = ()

    @property
    def total_bytes(self) -> int:
        return sum(file.bytes for file in self.files)


def folder_name(step: int, generation: int) -> str:
    return f"step-{step:08d}.g{generation}"


def parse_name(name: str) -> tuple[int, int] | None:
    """(step, generation), None where the name is not a checkpoint's."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def parse_manifest(data: bytes) -> Manifest:
    """
    Raises:
        CheckpointError: the text is no manifest.
    """
    try:
        return Manifest.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(f"{MANIFEST}: {where + ': ' if where else ''}{first['msg']}") from None
