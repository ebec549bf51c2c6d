"""Find the newest checkpoint that verifies, in whichever tier, and read it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from tidegate.checkpoint.layout import Part
from tidegate.checkpoint.manifest import Manifest, folder_name, parse_name
from tidegate.checkpoint.reading import check_all, read_headers, read_parts, whole_shapes
from tidegate.checkpoint.tiers import Candidate, Disk, FolderSource, Tier
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
    tier: str = "disk"

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"


@dataclass(frozen=True, slots=True)
class Found:
    checkpoint: Checkpoint | None
    skipped: tuple[Skipped, ...]
    """Newer ones that are not to be trusted, each with the reason."""


@dataclass(frozen=True, slots=True)
class Restored:
    """How all ranks together were restored; the same on every rank, but for the seconds and bytes."""

    manifest: Manifest | None
    """None: there was no checkpoint that verified."""
    skipped: tuple[Skipped, ...] = ()
    """Newer ones that are not to be trusted, each with the reason."""
    tier: str = ""
    touched: bool = False
    """None verified and the parts hold what is no checkpoint: they must be made anew."""
    seconds: float = 0.0
    bytes: int = 0
    """Read by this rank."""

    @property
    def candidate(self) -> Candidate | None:
        return Candidate(self.manifest.step, self.manifest.generation) if self.manifest else None

    @property
    def name(self) -> str:
        return folder_name(self.manifest.step, self.manifest.generation) if self.manifest else ""

    def rotten(self, tier: str) -> frozenset[str]:
        """Names of those in a tier that did not verify."""
        return frozenset(skipped.name for skipped in self.skipped if skipped.tier == tier)


@dataclass(frozen=True, slots=True)
class _Choice:
    """What rank 0 tells the others to read."""

    tier: int
    manifest: Manifest | None
    skipped: tuple[Skipped, ...]


def restore(tiers: Sequence[Tier], parts: Sequence[Part], group: dist.ProcessGroup) -> Restored:
    """Fill `parts` from the newest checkpoint that verifies, the nearest tier first where several have it.

    Rank 0 decides for all: ranks that each looked for themselves could disagree on a network file system, and wait for
    each other for ever. Each rank then reads what it needs and checks it; what one of them finds rotten, none uses.
    """
    began = time.perf_counter()
    skipped: tuple[Skipped, ...] = ()
    untried = _listed(tiers) if dist.get_rank(group) == 0 else ([], ())
    left, skipped = untried
    touched = False
    while True:
        choice = _told(_next(tiers, left, skipped) if dist.get_rank(group) == 0 else None, group)
        skipped = choice.skipped
        if choice.manifest is None:
            return Restored(None, skipped, touched=touched, seconds=time.perf_counter() - began)
        tier = tiers[choice.tier]
        candidate = Candidate(choice.manifest.step, choice.manifest.generation)
        read, why = _read(tier, candidate, choice.manifest, parts)
        problems: list[str | None] = [None] * dist.get_world_size(group)
        dist.all_gather_object(problems, why, group=group)
        wrong = next((problem for problem in problems if problem), None)
        if wrong is None:
            took = time.perf_counter() - began
            return Restored(choice.manifest, skipped, tier.label, seconds=took, bytes=read)
        touched = True
        skipped = (*skipped, Skipped(candidate.name, wrong, tier.label))


def _read(tier: Tier, candidate: Candidate, manifest: Manifest, parts: Sequence[Part]) -> tuple[int, str | None]:
    try:
        with tier.source(candidate) as source:
            return read_parts(source, manifest.files, parts), None
    except CheckpointError as error:
        return 0, str(error)


def _listed(tiers: Sequence[Tier]) -> tuple[list[tuple[Candidate, int]], tuple[Skipped, ...]]:
    """All that there may be, the best last; and tiers that cannot be looked through."""
    found, skipped = [], []
    for index, tier in enumerate(tiers):
        try:
            found += [(candidate, -index) for candidate in tier.candidates()]
        except CheckpointError as error:
            skipped.append(Skipped("all", str(error), tier.label))
    return sorted(found), tuple(skipped)


def _next(tiers: Sequence[Tier], left: list[tuple[Candidate, int]], skipped: tuple[Skipped, ...]) -> _Choice:
    while left:
        candidate, negative = left.pop()
        try:
            return _Choice(-negative, tiers[-negative].manifest(candidate), skipped)
        except CheckpointError as error:
            skipped = (*skipped, Skipped(candidate.name, str(error), tiers[-negative].label))
    return _Choice(0, None, skipped)


def _told(choice: _Choice | None, group: dist.ProcessGroup) -> _Choice:
    answer = [choice]
    dist.broadcast_object_list(answer, group_src=0, group=group)
    if answer[0] is None:
        raise CheckpointError("rank 0 sent no answer")
    return answer[0]


# Without any process group


def newest_good(checkpoints: Path) -> Found:
    """The newest checkpoint on disk, all of whose content is what it says."""
    disk = Disk(checkpoints)
    skipped: list[Skipped] = []
    try:
        candidates = sorted(disk.candidates(), reverse=True)
    except CheckpointError as error:
        return Found(None, (Skipped(checkpoints.name, str(error)),))
    for candidate in candidates:
        folder = checkpoints / candidate.name
        try:
            return Found(Checkpoint(folder, verified(folder)), tuple(skipped))
        except CheckpointError as error:
            skipped.append(Skipped(candidate.name, str(error)))
    return Found(None, tuple(skipped))


def verified(folder: Path) -> Manifest:
    """The manifest of a checkpoint after checking every file against it.

    Raises:
        CheckpointError: with the first thing that is wrong.
    """
    named = parse_name(folder.name)
    if named is None:
        raise CheckpointError(f"{folder.name} is no checkpoint's name")
    disk, candidate = Disk(folder.parent), Candidate(*named)
    manifest = disk.manifest(candidate)
    with disk.source(candidate) as source:
        check_all(source, manifest.files)
    return manifest


def load(checkpoint: Checkpoint, parts: Sequence[Part]) -> int:
    """Fill `parts` in place; how many bytes were read.

    Raises:
        CheckpointError: the checkpoint is of another network, or isn't what was saved.
    """
    with FolderSource(checkpoint.folder) as source:
        return read_parts(source, checkpoint.manifest.files, parts)


def full_model_weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The whole weights on the CPU."""
    with FolderSource(checkpoint.folder) as source:
        shapes = whole_shapes(read_headers(source, checkpoint.manifest.files))
        parts = [
            Part(name, torch.empty(shape, dtype=dtype), shape, (0,) * len(shape))
            for name, (shape, dtype) in shapes.items()
            if name.startswith(MODEL)
        ]
        read_parts(source, checkpoint.manifest.files, parts)
    return {part.name.removeprefix(MODEL): part.local for part in parts}
