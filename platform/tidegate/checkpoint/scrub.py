"""Look through kept checkpoints, check them, and delete those that a policy lets go."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from tidegate.checkpoint.manifest import Manifest
from tidegate.checkpoint.marks import KEEPS, Mark
from tidegate.checkpoint.places import Place
from tidegate.checkpoint.retention import Seen, doomed
from tidegate.checkpoint.tiers import Candidate
from tidegate.errors import CheckpointError


class State(StrEnum):
    GOOD = "good"
    UNFINISHED = "unfinished"
    """Never committed: being written, or cut short. It is never restored."""
    BAD = "bad"
    """Committed, and not what its manifest says."""


@dataclass(frozen=True, slots=True)
class Look:
    """One checkpoint in one place, as it was found."""

    place: Place
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


def look(place: Place) -> list[Look]:
    """All checkpoints of a place, newest first, after the checks that read no whole file.

    Raises:
        CheckpointError: the place cannot be looked through at all.
    """
    return [_seen(place, candidate, whole=False) for candidate in sorted(place.candidates(), reverse=True)]


def scrub(place: Place) -> Iterator[Look]:
    """As `look`, after every byte was read and hashed."""
    for candidate in sorted(place.candidates(), reverse=True):
        yield _seen(place, candidate, whole=True)


def _seen(place: Place, candidate: Candidate, *, whole: bool) -> Look:
    marks = place.marks(candidate)
    try:
        manifest = place.checked(candidate) if whole else place.manifest(candidate)
        return Look(place, candidate, State.GOOD, manifest=manifest, marks=marks)
    except CheckpointError as error:
        state = State.BAD if place.is_committed(candidate) else State.UNFINISHED
        return Look(place, candidate, state, why=str(error), marks=marks)


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


def named(looks: list[Look], name: str) -> list[Look]:
    """Those that `name` means: a step (`200`) or a checkpoint's whole name (`step-00000200.g3`).

    Raises:
        CheckpointError: none, or several generations of one step.
    """
    found = [
        seen for seen in looks if seen.candidate.name == name or (name.isdigit() and seen.candidate.step == int(name))
    ]
    names = sorted({seen.candidate.name for seen in found})
    if not found:
        there = ", ".join(sorted({seen.candidate.name for seen in looks})) or "none"
        raise CheckpointError(f"no checkpoint {name}\nhint: there is {there}")
    if len(names) > 1:
        raise CheckpointError(f"step {name} was saved by several generations\nhint: name one of {', '.join(names)}")
    return found
