"""Look through kept checkpoints, check them, and delete those that a policy lets go."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from tidegate.checkpoint.manifest import Manifest
from tidegate.checkpoint.marks import KEEPS, Mark
from tidegate.checkpoint.places import Place
from tidegate.checkpoint.reading import check_all
from tidegate.checkpoint.retention import Seen, doomed
from tidegate.checkpoint.tiers import Candidate, Tier
from tidegate.errors import CheckpointError, UnfinishedError


class State(StrEnum):
    GOOD = "good"
    UNFINISHED = "unfinished"
    """Never committed: being written, or cut short. It is never restored."""
    BAD = "bad"
    """Committed, and not what its manifest says."""


@dataclass(frozen=True, slots=True)
class Look:
    """One checkpoint in one tier, as it was found."""

    tier: Tier
    candidate: Candidate
    state: State
    why: str = ""
    """Why it is not good."""
    manifest: Manifest | None = None
    marks: Mapping[Mark, str] = field(default_factory=dict)

    def age_s(self, now_s: float) -> float | None:
        """Seconds since its commit by the clock of the machine that committed it; negative where that clock was ahead.
        For people to read: what is newer is decided by step and generation, which no clock can move."""
        return None if self.manifest is None else now_s - self.manifest.at_s


def checked(tier: Tier, candidate: Candidate) -> Manifest:
    """Its manifest, after every byte of every file was read and compared with it.

    Raises:
        CheckpointError: with the first thing that is wrong.
    """
    manifest = tier.manifest(candidate)
    with tier.source(candidate) as source:
        check_all(source, manifest.files)
    return manifest


def look(tier: Tier) -> list[Look]:
    """All checkpoints of a tier, newest first, after the checks that read no whole file.

    Raises:
        CheckpointError: the tier cannot be looked through at all.
    """
    return [_seen(tier, candidate, whole=False) for candidate in sorted(tier.candidates(), reverse=True)]


def scrub(tier: Tier) -> Iterator[Look]:
    """As `look`, after every byte was read and hashed."""
    for candidate in sorted(tier.candidates(), reverse=True):
        yield _seen(tier, candidate, whole=True)


def _seen(tier: Tier, candidate: Candidate, *, whole: bool) -> Look:
    marks = tier.marks(candidate) if isinstance(tier, Place) else {}
    try:
        manifest = checked(tier, candidate) if whole else tier.manifest(candidate)
        return Look(tier, candidate, State.GOOD, manifest=manifest, marks=marks)
    except CheckpointError as error:
        state = State.UNFINISHED if isinstance(error, UnfinishedError) else State.BAD
        return Look(tier, candidate, state, why=str(error), marks=marks)


def to_prune(place: Place, keep: int) -> tuple[Look, ...]:
    """What may go so that the newest `keep` good ones are left: see `retention.doomed`. Pinned ones stay.

    From the newest on they are read and hashed until one is whole: a rotten one must not take the last good one's
    place.
    """
    looks = look(place)
    for number, found in enumerate(looks):
        if found.state is State.GOOD:
            looks[number] = _seen(place, found.candidate, whole=True)
            if looks[number].state is State.GOOD:
                break
    by_seen = {
        Seen(
            found.candidate.step,
            found.candidate.generation,
            good=found.state is State.GOOD,
            kept=bool(KEEPS & found.marks.keys()),
        ): found
        for found in looks
    }
    return tuple(by_seen[seen] for seen in doomed(list(by_seen), keep))


def named(candidates: Sequence[Candidate], name: str) -> Candidate:
    """The one that `name` means: a step (`200`) or a checkpoint's whole name (`step-00000200.g3`).

    Raises:
        CheckpointError: none, or several generations of one step.
    """
    found = sorted({one for one in candidates if one.name == name or (name.isdigit() and one.step == int(name))})
    if not found:
        there = ", ".join(one.name for one in sorted(set(candidates))) or "none"
        raise CheckpointError(f"no checkpoint {name}\nhint: there is {there}")
    if len(found) > 1:
        names = ", ".join(one.name for one in found)
        raise CheckpointError(f"step {name} was saved by several generations\nhint: name one of {names}")
    return found[0]
