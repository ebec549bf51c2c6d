"""A node's burn-in in a process of its own, so that an NVML that hangs takes nobody along. What it does with what it is
told is the health room's (`tidegate.health.burn_in`); it is told and answers by JSON.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

EXAMINER = (sys.executable, "-m", "tidegate.health.burn_in")
PARTS = 4
"""Products, sums and looks, each with the policy's deadline."""
_LAST_LINES = 3
"""Of what it says of its own failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """How it came out: one of the three."""

    said: Any = None
    """As its JSON has it."""
    late: str | None = None
    error: str | None = None


def ask_examiner(told: str, limit_s: float) -> Answer:
    """Blocks for at most `limit_s`; whoever hangs in the driver then may stay, and is not waited for."""
    process = subprocess.Popen(
        EXAMINER,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        said, error = process.communicate(told, timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return Answer(late=f"no end within {limit_s:g} s")
    if process.returncode != 0:
        last = error.strip().splitlines()[-_LAST_LINES:]
        return Answer(error=f"exit code {process.returncode}: {' '.join(last)}")
    return Answer(said=json.loads(said.splitlines()[-1]))
