"""Manners of the processes beside training: they give way to it, and say what they have to say in lines of JSON."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
"""The number of a system call that has no wrapper."""
_THIS_PROCESS, _IDLE = 1, 3 << 13


def give_way() -> None:
    """Behind training at the CPUs; at disks too, where the kernel knows such a thing."""
    os.nice(15)
    number = _IOPRIO_SET.get(os.uname().machine)
    if number is not None:
        ctypes.CDLL(None).syscall(number, _THIS_PROCESS, 0, _IDLE)


def own_output() -> Callable[[str], None]:
    """Writes a line to the standard output, on which nothing else stands from now on: what libraries print goes to the
    standard error."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(line: str) -> None:
        out.write(line + "\n")

    return say
