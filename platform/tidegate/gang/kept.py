"""What a coordinator's next process must know of its run: one file, written whole at each change that matters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from tidegate.checkpoint.files import write_synced
from tidegate.gang.shape import Gang
from tidegate.ids import ClaimId, Generation
from tidegate.spec.policy import GangSpec, HealthSpec

KEPT = "gang_state.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    actor: str
    """The Ray actor whose life this is: a later run in the same folder has another."""
    claim: ClaimId | None = None
    spec: GangSpec | None = None
    examine_by: HealthSpec | None = None
    """Where the policy wants a burn-in before the gang's first start on a node: how."""
    gang: Gang | None = None
    led: int = 0
    """The newest of Ray Train's controllers that was told to lead. One that is gone since has no second life."""
    stop_reason: str | None = None
    ended: tuple[str, str] | None = None
    over: bool = False


_ADAPTER = TypeAdapter(Kept)


def same_to_keep(one: Kept, other: Kept) -> bool:
    """Whether they differ in nothing but what the next beats tell anyway."""
    return _essence(one) == _essence(other)


def write_kept(run_dir: Path, kept: Kept) -> None:
    gang = kept.gang
    if gang is not None:
        kept = replace(kept, gang=replace(gang, beats={}, heard_s={}))
    write_synced(run_dir / KEPT, _ADAPTER.dump_json(kept, indent=1))


def read_kept(run_dir: Path, actor: str) -> tuple[Kept, Generation]:
    """What this actor kept (an empty one where the file is another's, or none), and the highest generation that was
    ever planned in this folder."""
    try:
        found = _ADAPTER.validate_json((run_dir / KEPT).read_bytes())
    except FileNotFoundError:
        return Kept(actor=actor), Generation(0)
    except ValidationError:  # of an older release; the run goes on from its checkpoints, as a new one
        return Kept(actor=actor), Generation(0)
    generation = found.gang.generation if found.gang is not None else Generation(0)
    return (found if found.actor == actor else Kept(actor=actor)), generation


def _essence(kept: Kept) -> Kept:
    gang = kept.gang
    if gang is None:
        return kept
    members = {node: replace(member, port=0) for node, member in gang.members.items()}
    still = replace(
        gang,
        members=members,
        heard_s={},
        beats={},
        step=-1,
        best_step=-1,
        committed_step=-1,
        committed_at_s=None,
        pace=(),
        stepped_at_s=0.0,
    )
    return replace(kept, gang=still)
