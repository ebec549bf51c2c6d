"""How a restore drill went, for a run, a person and the record."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tidegate.spec.policy import Model

DRILLS = "drills.jsonl"
"""In the run's directory: a line a drill."""


class Drilled(Model):
    """How a drill went."""

    tier: str
    name: str = ""
    """Of the checkpoint; empty where there was none."""
    good: bool = True
    problem: str | None = None
    """What is wrong with the checkpoint; or why there was no drill, where `good` is true."""
    compared_with: str = ""
    """Whom the weights were compared with; empty: nobody, only with their hashes."""
    tensors: int = 0
    bytes: int = 0
    seconds: float = 0.0


def as_text(drilled: Drilled) -> str:
    """For people, in a line."""
    what = f"{drilled.tier}: {drilled.name}".rstrip(": ")
    if drilled.problem is not None:
        return f"{what}: {drilled.problem}" if drilled.good else f"{what} is bad, and marked: {drilled.problem}"
    compared = f"the same as {drilled.compared_with} has it" if drilled.compared_with else "as its hashes say"
    return f"{what} lives: {drilled.tensors} tensors {compared}, {drilled.seconds:.1f} s"


def write_drill(run_dir: Path, drilled: Drilled, at_s: float) -> None:
    """One write, so that lines of two processes never mix."""
    line = json.dumps({"at_s": round(at_s, 3), **drilled.model_dump(mode="json")}) + "\n"
    handle = os.open(run_dir / DRILLS, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        os.write(handle, line.encode())
    finally:
        os.close(handle)
