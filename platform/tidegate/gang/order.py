"""What a job asks of a run's coordinator, and what it is told."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from tidegate.arbiter.messages import ClaimSpec
from tidegate.spec.policy import GangSpec
from tidegate.train.config import RunConfig
from tidegate.train.mesh import accepted


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOrder:
    """What a job asks for."""

    claim: ClaimSpec
    config: RunConfig
    data_dir: str
    run_dir: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """What a job is told about its run."""

    state: str
    """`claiming`, then the gang's status."""
    reason: str
    step: int
    steps: int
    loss: float | None
    world_size: int
    generation: int
    over: bool
    """The run has ended and its GPUs are given back."""


def differences(mine: RunOrder, asked: RunOrder) -> tuple[str, ...]:
    """What another job asks of the run that this one doesn't do. Who asks does not matter."""
    claim, other = asdict(mine.claim), asdict(asked.claim)
    differs = [
        f"{key} {claim[key]} (asked: {other[key]})" for key in claim if key != "owner" and claim[key] != other[key]
    ]
    differs += [
        f"{key} {getattr(mine, key)} (asked: {getattr(asked, key)})"
        for key in ("data_dir", "run_dir")
        if getattr(mine, key) != getattr(asked, key)
    ]
    return (*differs, *(["config"] if mine.config != asked.config else []))


def clocks_problem(spec: GangSpec, config: RunConfig) -> str | None:
    """Why the run's collective timeout and the gang's start deadline hide each other's cause, None if they don't.

    A rank that is killed while its collective waits says nothing; one whose collective gives up says which (C045).
    """
    if config.timeout_s < spec.start_deadline_s:
        return None
    return (
        f"timeout_s {config.timeout_s:g} of the run must be shorter than the policy's gang.start_deadline_s "
        f"{spec.start_deadline_s:g}: else a start that hangs is killed before its collective says where"
    )


def accepts(order: RunOrder) -> tuple[int, ...]:
    """Numbers of ranks that the run can use, smallest first; empty where it can use any that it may get."""
    sizes = accepted(order.config, order.claim.max_gpus)
    return () if len(sizes) == order.claim.max_gpus else sizes


def mesh_problem(order: RunOrder) -> str | None:
    """Why no number of GPUs that the claim may get fits the run's mesh and batch, None if one does."""
    claim, config = order.claim, order.config
    sizes = accepted(config, claim.max_gpus)
    if sizes and sizes[-1] >= claim.min_gpus:
        return None
    usable = f"at most {sizes[-1]}" if sizes else "none"
    return (
        f"of {claim.min_gpus} to {claim.max_gpus} GPUs the run can use {usable}: parallel is "
        f"{config.parallel.replicate} × {config.parallel.shard} × {config.parallel.tensor} "
        f"(replicate × shard × tensor), and each part of the batch needs a sample"
    )
