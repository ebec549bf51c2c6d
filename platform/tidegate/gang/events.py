"""What may happen to a gang. Plain frozen values. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from tidegate.arbiter.messages import Grant
from tidegate.gang.plan import Member, RankBeat
from tidegate.ids import Generation, GpuId, NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class Formed:
    """Ray Train has been told where to start its workers: those before are gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    member: Member


@dataclass(frozen=True, slots=True, kw_only=True)
class Beaten:
    """An agent's report."""

    node: NodeId
    agent: str
    generation: Generation
    port: int
    ranks: tuple[RankBeat, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evicted:
    node: NodeId
    gpu: GpuId | None
    """None = every GPU of the node."""
    reason: str
    save_by_s: float | None = None
    """Save first, and be gone by then (a drain notice); None = at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Regranted:
    """The arbiter's newest grant. With the same placement group its GPUs are used from the next checkpoint on; with
    another the gang forms again there. One that is not newer changes nothing."""

    grant: Grant


@dataclass(frozen=True, slots=True, kw_only=True)
class Ungranted:
    """The arbiter has taken the placement group away: for another one, or until the gang's turn comes again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveAsked:
    """Save, give the nodes back, and wait for the next grant."""

    reason: str
    by_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAsked:
    """Save, then end."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainLost:
    """Ray Train's controller is gone, and its workers with it."""

    train: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainEnded:
    """Ray Train gave up its worker group for good."""

    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reattached:
    """The coordinator's process is a new one and has read this gang from its file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticked:
    """Time has passed."""


Event: TypeAlias = (
    Formed
    | Joined
    | Beaten
    | Evicted
    | Regranted
    | Ungranted
    | LeaveAsked
    | StopAsked
    | TrainLost
    | TrainEnded
    | Reattached
    | Ticked
)
