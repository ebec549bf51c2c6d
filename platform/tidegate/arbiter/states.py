"""The states of a claim, and the edges between them. Pure.

    queued -> proving    canaries go to the providers
           -> draining   placement group created; gateways told to spill; then, once they follow, targets set to 0
           -> granted    the placement group is ready
           -> running    the gang has made its first step
           -> returning  the group is removed, replicas come home in steps, the spillway closes last
           -> done

A gang that loses a node, swaps one or grows forms again: running -> draining -> granted -> running, under a new
placement group. A stronger claim sends one to preempted, and from there to the queue, where it keeps its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class ClaimState(StrEnum):
    QUEUED = "queued"
    PROVING = "proving"
    DRAINING = "draining"
    GRANTED = "granted"
    RUNNING = "running"
    PREEMPTED = "preempted"
    """Asked to save and leave; its GPUs are its own until it has, or until its notice ends."""
    RETURNING = "returning"
    DONE = "done"
    UNDONE = "undone"


NEXT: Mapping[ClaimState, frozenset[ClaimState]] = {
    ClaimState.QUEUED: frozenset({ClaimState.PROVING, ClaimState.DRAINING, ClaimState.DONE, ClaimState.UNDONE}),
    ClaimState.PROVING: frozenset({ClaimState.DRAINING, ClaimState.QUEUED, ClaimState.DONE, ClaimState.UNDONE}),
    ClaimState.DRAINING: frozenset(
        {ClaimState.DRAINING, ClaimState.GRANTED, ClaimState.QUEUED, ClaimState.RETURNING, ClaimState.UNDONE}
    ),
    ClaimState.GRANTED: frozenset(
        {ClaimState.RUNNING, ClaimState.DRAINING, ClaimState.PREEMPTED, ClaimState.QUEUED, ClaimState.RETURNING}
    ),
    ClaimState.RUNNING: frozenset({ClaimState.DRAINING, ClaimState.PREEMPTED, ClaimState.QUEUED, ClaimState.RETURNING}),
    ClaimState.PREEMPTED: frozenset({ClaimState.QUEUED, ClaimState.RETURNING}),
    ClaimState.RETURNING: frozenset({ClaimState.DONE}),
    ClaimState.DONE: frozenset(),
    ClaimState.UNDONE: frozenset(),
}
"""Every edge a claim may take. Only a claim that never ran is undone; one that ran ends as done."""

HOLDING = frozenset({ClaimState.DRAINING, ClaimState.GRANTED, ClaimState.RUNNING, ClaimState.PREEMPTED})
"""States in which a claim's nodes are closed to serving and to weaker claims."""

WAITING = frozenset({ClaimState.QUEUED, ClaimState.PROVING})

ENDED = frozenset({ClaimState.DONE, ClaimState.UNDONE})
