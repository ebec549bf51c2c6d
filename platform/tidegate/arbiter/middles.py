"""Medians over whole gangs: what each node's health agent can't know alone. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

from tidegate.arbiter.messages import GangReport, HealthReport, Middle
from tidegate.ids import GpuId

STEP_COMPUTE = "rank_step_compute_seconds"
"""The signal that the ranks themselves tell; all others come from the agents."""
FEWEST = 3
"""With fewer nobody can say which of them is the odd one."""


def middles_of(gang: GangReport, reports: Iterable[HealthReport]) -> dict[str, Middle]:
    """Of each signal that at least `FEWEST` of the gang's GPUs tell. `reports`: fresh ones, of any nodes."""
    values: dict[str, list[float]] = {STEP_COMPUTE: [value for value in gang.compute_s if value is not None]}
    members = frozenset(gang.gpus)
    for report in reports:
        for signal, told in report.compared.items():
            values.setdefault(signal, []).extend(value for gpu, value in told.items() if gpu in members)
    return {signal: middle(told) for signal, told in values.items() if len(told) >= FEWEST}


def middle(values: Sequence[float]) -> Middle:
    median = statistics.median(values)
    return Middle(count=len(values), median=median, mad=statistics.median(abs(value - median) for value in values))


def place_of(gang: GangReport) -> Mapping[GpuId, int]:
    """Each GPU's rank."""
    return {gpu: rank for rank, gpu in enumerate(gang.gpus)}
