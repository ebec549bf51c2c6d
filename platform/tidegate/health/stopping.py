"""`tidegate drill hang`: a rank is stopped for real."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Mapping

from tidegate.arbiter.messages import Seat
from tidegate.health.drills import DrillError
from tidegate.ids import GpuId

logger = logging.getLogger(__name__)


def stop_a_rank(seats: Mapping[GpuId, Seat], gpu: str | None = None, *, dry_run: bool) -> str:
    """Stop the process of a rank of this node, the first one's or that on `gpu`; what follows, as a sentence.

    Raises:
        DrillError: no rank computes on that GPU, or on this node.
    """
    there = {seat_gpu: seat for seat_gpu, seat in seats.items() if seat.pid is not None}
    if not there or (gpu is not None and gpu not in there):
        named = ", ".join(sorted(there)) or "none is there"
        raise DrillError(f"hang needs a GPU with a rank, one of: {named}\nhint: name it by --subject")
    on = GpuId(gpu) if gpu is not None else sorted(there)[0]
    seat = there[on]
    assert seat.pid is not None
    if not dry_run:
        logger.warning("health: process %d on %s is stopped: a drill", seat.pid, on)
        os.kill(seat.pid, signal.SIGSTOP)
    would = "would be" if dry_run else "is"
    return (
        f"{on}: the rank of run {seat.claim} (process {seat.pid}) {would} stopped; its gang is found hung after "
        "max(gang.hang_floor_s, gang.hang_steps × its median step), tells where all ranks stand "
        f"(`tidegate why {seat.claim}`), and starts anew from its newest copy"
    )
