"""Checkpoint averaging (pre-trained model averaging, PMA): the mean of several checkpoints' weights.

It stands in for an exponential moving average kept while training: as good, and it costs the run no memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from tidegate.checkpoint.manifest import parse_name
from tidegate.checkpoint.restore import Checkpoint, Skipped, full_model_weights, verified
from tidegate.errors import CheckpointError


def mean_weights(checkpoints: Sequence[Checkpoint]) -> dict[str, Tensor]:
    """Float32 on the CPU, under the network's own names. Holds two checkpoints' weights at a time.

    Raises:
        CheckpointError: one has other tensors than the first.
    """
    mean: dict[str, Tensor] = {}
    for count, checkpoint in enumerate(checkpoints, 1):
        weights = full_model_weights(checkpoint)
        if count == 1:
            mean = {name: tensor.float() for name, tensor in weights.items()}
        elif {name: tensor.shape for name, tensor in weights.items()} != {
            name: part.shape for name, part in mean.items()
        }:
            raise CheckpointError(f"{checkpoint.folder}: other tensors than {checkpoints[0].folder.name}")
        for name, tensor in weights.items():
            mean[name].lerp_(tensor.float(), 1 / count)  # equal ones stay exactly what they are
    return mean


def newest(checkpoints: Path, count: int) -> tuple[list[Checkpoint], list[Skipped]]:
    """The newest `count` that verify, one a step, oldest first; and those that did not.

    Raises:
        CheckpointError: there are not so many.
    """
    names = [path.name for path in checkpoints.iterdir()] if checkpoints.is_dir() else []
    parsed = sorted(((parsed, name) for name in names if (parsed := parse_name(name)) is not None), reverse=True)
    found: dict[int, Checkpoint] = {}
    skipped: list[Skipped] = []
    for (step, _), name in parsed:
        if len(found) == count:
            break
        if step in found:  # saved again by a later generation
            continue
        try:
            found[step] = Checkpoint(checkpoints / name, verified(checkpoints / name))
        except CheckpointError as error:
            skipped.append(Skipped(name, str(error)))
    if len(found) < count:
        raise CheckpointError(f"{checkpoints}: {len(found)} good checkpoints, asked for {count}\nhint: ask for fewer")
    return [found[step] for step in sorted(found)], skipped


def named(checkpoints: Path, names: Sequence[str]) -> list[Checkpoint]:
    """
    Raises:
        CheckpointError: one is not there, or doesn't verify.
    """
    found = []
    for name in names:
        try:
            found.append(Checkpoint(checkpoints / name, verified(checkpoints / name)))
        except CheckpointError as error:
            raise CheckpointError(f"{checkpoints / name}: {error}") from None
    return found
