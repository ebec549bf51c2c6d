"""Which nodes are examined before a gang starts there, and what follows from what the burn-in found. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tidegate.arbiter.messages import Check, Grant
from tidegate.ids import GpuId, NodeId

Asked = Mapping[NodeId, tuple[GpuId, ...]]
"""The GPUs of each node that are examined."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    node: NodeId
    gpu: GpuId | None
    """None: the node."""
    reason: str

    @property
    def subject(self) -> str:
        return self.gpu or self.node


def due(grant: Grant, evicted: Collection[GpuId], settled: Collection[GpuId]) -> Asked:
    """Nodes of which a GPU is neither `evicted` nor `settled` (examined before), with all that the gang has there: what
    a GPU does while its neighbours work counts too."""
    here = {node.node: tuple(gpu for gpu in node.gpus if gpu not in evicted) for node in grant.nodes}
    return {node: gpus for node, gpus in here.items() if not set(gpus) <= set(settled)}


def failures(asked: Asked, checks: Mapping[NodeId, Sequence[Check]]) -> tuple[Failure, ...]:
    """Who must go. A node goes only for what none of its GPUs is blamed for: one that computes wrong spoils its node's
    sum, and the next examination, without it, says whether that was all."""
    found: list[Failure] = []
    for node, gpus in asked.items():
        bad = [check for check in checks.get(node, ()) if not check.passed]
        blamed = {gpu: [check for check in bad if check.subject == gpu] for gpu in gpus}
        rest = [check for check in bad if check.subject not in gpus]
        of_gpus = [Failure(node=node, gpu=gpu, reason=_said(lines)) for gpu, lines in blamed.items() if lines]
        found += of_gpus or ([Failure(node=node, gpu=None, reason=_said(rest))] if rest else [])
    return tuple(found)


def passed(asked: Asked, checks: Mapping[NodeId, Sequence[Check]]) -> frozenset[GpuId]:
    """GPUs of the nodes on which nothing failed. Where something did, the others were not examined to the end."""
    good = [node for node in asked if node in checks and all(check.passed for check in checks[node])]
    return frozenset(gpu for node in good for gpu in asked[node])


def out(asked: Asked, failed: Sequence[Failure]) -> frozenset[GpuId]:
    """The GPUs that leave for it: of a node all."""
    return frozenset(
        gpu for failure in failed for gpu in ((failure.gpu,) if failure.gpu is not None else asked[failure.node])
    )


def _said(checks: Sequence[Check]) -> str:
    return "; ".join(f"{check.name} of {check.subject}: {check.text}" for check in checks)
