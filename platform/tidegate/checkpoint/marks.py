"""Small files beside a checkpoint's own that say what people, drills and uploads think of it.

    step-00000200.g3/
      pinned    kept whatever the policy says, until somebody takes the pin out
      bad       never to be restored: a drill loaded it and found something wrong
      sending   on its way to the object store: kept until it is there

Each holds a sentence that says why. They are no part of what the manifest vouches for.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

from tidegate.checkpoint.files import sync_folder, write_synced
from tidegate.errors import CheckpointError


class Mark(StrEnum):
    PINNED = "pinned"
    BAD = "bad"
    SENDING = "sending"


KEEPS = frozenset({Mark.PINNED, Mark.SENDING})
"""Retention leaves a checkpoint with one of these alone."""


def marks_in(folder: Path) -> Mapping[Mark, str]:
    """The marks of a checkpoint's folder with what they say."""
    found = {}
    for mark in Mark:
        try:
            found[mark] = as_sentence((folder / mark).read_bytes())
        except FileNotFoundError:
            continue
        except OSError as error:
            # It is there: a pin that can't be read still holds, and a bad checkpoint is not good again.
            found[mark] = f"(cannot be read: {error.strerror})"
    return found


def is_kept(folder: Path) -> bool:
    """Whether retention must leave it alone."""
    return any((folder / mark).exists() for mark in KEEPS)


def is_bad(folder: Path) -> bool:
    return (folder / Mark.BAD).exists()


def refuse_bad(folder: Path) -> None:
    """
    Raises:
        CheckpointError: it is marked bad; says why.
    """
    marks = marks_in(folder)
    if Mark.BAD in marks:
        raise CheckpointError(f"marked bad: {marks[Mark.BAD]}")


def set_mark(folder: Path, mark: Mark, why: str) -> None:
    """Mark it, durably. Marked again it says the newer reason."""
    write_synced(folder / mark, why.encode() + b"\n")


def clear_mark(folder: Path, mark: Mark) -> None:
    """Take a mark away; nothing happens where there is none."""
    if (folder / mark).exists():
        (folder / mark).unlink(missing_ok=True)
        sync_folder(folder)


def as_sentence(content: bytes) -> str:
    """What a mark's file says, in one line."""
    return " ".join(content.decode(errors="replace").split())
