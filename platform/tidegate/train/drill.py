"""A restore drill: bring a committed checkpoint to life in a process that does nothing else, and look hard at it.

Hashes say that a checkpoint is what was saved; a drill says that what was saved can be trained on. It

1. builds a fresh network of the run's settings and fills it from the checkpoint, each block checked against its hash;
2. compares the network's weights with those that an independent reader finds: safetensors' own for files on disk, the
   disk's checkpoint of the same name for one in the object store;
3. wants all weights and moments to be finite, second moments not negative, and none missing or too many;
4. lets the network guess once on noise, and wants a finite answer.

What fails is marked `bad` in its place, so that no restore takes it. A line for each drill stands in `drills.jsonl`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from tidegate.checkpoint.difference import differences
from tidegate.checkpoint.layout import Part
from tidegate.checkpoint.manifest import Manifest
from tidegate.checkpoint.marks import Mark
from tidegate.checkpoint.places import DiskPlace, Place
from tidegate.checkpoint.reading import read_headers, read_parts, whole_shapes
from tidegate.checkpoint.restore import MODEL
from tidegate.checkpoint.store_errors import StoreError
from tidegate.checkpoint.tiers import Candidate, Source
from tidegate.errors import CheckpointError, UnfinishedError
from tidegate.train.config import RunConfig
from tidegate.train.drilled import Drilled, write_drill
from tidegate.train.learner import MOMENTS
from tidegate.train.model import positions, seeded, velocity

_TRIES = 3


class _Bad(Exception):
    """The checkpoint is not to be trusted; says why."""


class _OtherNetworkError(Exception):
    """The settings are of another network than the checkpoint; which of the two is wrong, nobody knows."""


def drill(place: Place, config: RunConfig, *, twin: DiskPlace | None = None) -> Drilled:
    """Drill the newest committed checkpoint of a place, and mark it where it fails.

    Args:
        twin: the disk, where `place` is something else: what it has under the same name must be equal.

    Raises:
        StoreError: the place cannot be read or written; nothing is known of the checkpoint.
    """
    began = time.perf_counter()
    for _ in range(_TRIES):
        candidate = _newest(place)
        if candidate is None:
            return Drilled(tier=place.label, problem="nothing is committed")
        about = Drilled(tier=place.label, name=candidate.name)
        try:
            about = about.model_copy(update=_drilled(place, candidate, config, twin))
        except StoreError:
            raise
        except _OtherNetworkError as error:
            about = about.model_copy(update={"problem": str(error)})
        except (_Bad, CheckpointError) as error:
            if candidate not in place.candidates():
                continue  # retention has deleted it meanwhile: there is a newer one
            about = about.model_copy(update={"good": False, "problem": " ".join(str(error).split())})
            place.mark(candidate, Mark.BAD, f"restore drill: {about.problem}")
        return about.model_copy(update={"seconds": round(time.perf_counter() - began, 3)})
    return Drilled(tier=place.label, problem=f"retention was faster, {_TRIES} times")


def _newest(place: Place) -> Candidate | None:
    """The newest that was committed and is not known to be bad already."""
    for candidate in sorted(place.candidates(), reverse=True):
        if Mark.BAD in place.marks(candidate):
            continue
        try:
            place.manifest(candidate)
        except UnfinishedError:
            continue
        except StoreError:
            raise
        except CheckpointError:
            pass  # committed, and bad: the drill will say so
        return candidate
    return None


def _drilled(place: Place, candidate: Candidate, config: RunConfig, twin: DiskPlace | None) -> dict[str, Any]:
    manifest = place.manifest(candidate)
    with place.source(candidate) as source:
        shapes = whole_shapes(read_headers(source, manifest.files))
        network = seeded(config.model, config.seed)
        weights = {name: parameter.data for name, parameter in network.named_parameters()}
        _check_shapes({name: shape for name, (shape, _) in shapes.items()}, weights)
        read = read_parts(source, manifest.files, [_whole(MODEL + name, tensor) for name, tensor in weights.items()])
        for name, tensor in weights.items():
            _check_numbers(MODEL + name, tensor)
        for batch in _moments(weights):
            read += _check_moments(source, manifest, batch)
        compared_with = _compare(place, candidate, source, manifest, weights, twin)
    _check_guess(network, config)
    return {"compared_with": compared_with, "tensors": len(shapes), "bytes": read}


def _check_shapes(shapes: Mapping[str, tuple[int, ...]], weights: Mapping[str, Tensor]) -> None:
    wanted = {kind + name: tuple(tensor.shape) for kind in (MODEL, *MOMENTS) for name, tensor in weights.items()}
    for what, names in (
        ("missing", wanted.keys() - shapes.keys()),
        ("of no use", shapes.keys() - wanted.keys()),
        ("of another shape", {name for name in wanted.keys() & shapes.keys() if wanted[name] != shapes[name]}),
    ):
        if names:
            raise _OtherNetworkError(
                f"not the network of the run's settings: {len(names)} tensors {what}, first {min(names)}"
            )


def _whole(name: str, tensor: Tensor) -> Part:
    return Part(name, tensor, tuple(tensor.shape), (0,) * tensor.dim())


def _check_numbers(name: str, tensor: Tensor) -> None:
    if not torch.isfinite(tensor).all():
        raise _Bad(f"{name} has numbers that are not finite")
    if name.startswith("exp_avg_sq.") and (tensor < 0).any():
        raise _Bad(f"{name} has negative numbers")


def _moments(weights: Mapping[str, Tensor]) -> Iterator[list[tuple[str, Tensor]]]:
    """Names and shapes, a few at a time: all of them take twice the network's memory."""
    for kind in MOMENTS:
        names = list(weights)
        for first in range(0, len(names), 16):
            yield [(kind + name, weights[name]) for name in names[first : first + 16]]


def _check_moments(source: Source, manifest: Manifest, like: Sequence[tuple[str, Tensor]]) -> int:
    parts = [_whole(name, torch.empty_like(tensor)) for name, tensor in like]
    read = read_parts(source, manifest.files, parts)
    for part in parts:
        _check_numbers(part.name, part.local)
    return read


def _compare(
    place: Place,
    candidate: Candidate,
    source: Source,
    manifest: Manifest,
    weights: Mapping[str, Tensor],
    twin: DiskPlace | None,
) -> str:
    """Whom the weights were compared with."""
    if isinstance(place, DiskPlace):
        for file in manifest.files:
            _compare_file(place.checkpoints / candidate.name / file.name, weights)
        return "safetensors' reader"
    if twin is None:
        return ""
    try:
        other = twin.manifest(candidate)
    except CheckpointError:
        return ""  # the disk keeps fewer
    with twin.source(candidate) as theirs:
        for found in differences((source, manifest), (theirs, other)):
            if not found.same:
                raise _Bad(f"{found.tensor} differs from the disk's: {found.why or found.max_abs}")
    return "the disk's"


def _compare_file(path: Path, weights: Mapping[str, Tensor]) -> None:
    with safe_open(path, framework="pt") as file:
        offsets = json.loads(file.metadata()["DCP_SHARDING_INFO"])
        for key in file.keys():  # noqa: SIM118  # not a dictionary
            if not key.startswith(MODEL):
                continue
            saved = file.get_tensor(key)
            begins = offsets[key]["saved_offsets"]
            box = tuple(slice(begin, begin + length) for begin, length in zip(begins, saved.shape, strict=True))
            if not torch.equal(weights[key.removeprefix(MODEL)][box], saved):
                raise _Bad(f"{key} was not restored as safetensors reads it from {path.name}")


@torch.inference_mode()
def _check_guess(network: torch.nn.Module, config: RunConfig) -> None:
    spec, noise = config.model, torch.Generator().manual_seed(0)
    tokens = torch.randn(1, config.image.tokens, spec.in_channels, generator=noise)
    states = torch.randn(1, config.text.length, spec.num_text_layers, spec.text_hidden_dim, generator=noise)
    mask, times = torch.ones(1, config.text.length, dtype=torch.bool), torch.full((1,), 0.5)
    guess = velocity(network, tokens, states, mask, times, positions(config.text.length, config.image))
    if not torch.isfinite(guess).all():
        raise _Bad("the restored network's guess is not finite")


def drill_places(
    run_dir: Path, places: Sequence[Place], config: RunConfig, *, clock: Callable[[], float] = time.time
) -> Iterator[Drilled]:
    """Drill each place and note it down. One that can't be reached has no bad checkpoint, and is told all the same."""
    twin = next((place for place in places if isinstance(place, DiskPlace)), None)
    for place in places:
        try:
            drilled = drill(place, config, twin=twin)
        except CheckpointError as error:
            drilled = Drilled(tier=place.label, problem=f"no drill: {' '.join(str(error).split())}")
        write_drill(run_dir, drilled, clock())
        yield drilled
