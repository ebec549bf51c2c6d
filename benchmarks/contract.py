"""What every benchmark publishes: one JSON object, printed as its last line and kept in `benchmarks/results/`.

A metric compares ours with a peer's figure or with a limit that physics or the machine sets. Its ratio is the median
of the rounds' ratios, not the ratio of medians: contenders alternate, so both sides of a round saw the same machine.
"""

from __future__ import annotations

import math
import operator
import os
import platform
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

RESULTS = Path(__file__).parent / "results"
MIN_ROUNDS = 5
"""Fewer are a smoke test: printed, never kept."""

_GOAL = re.compile(r"(>=|<=) (\d+(?:\.\d+)?)")
_HOLDS: Mapping[str, Callable[[float, float], bool]] = {">=": operator.ge, "<=": operator.le}


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class Metric(Frozen):
    ours: float
    """Median over the rounds, like `peer` and `limit`; the unit is in the metric's name, or seconds."""
    peer: float | None = None
    limit: float | None = None
    ratio: float | None = None
    """Median of the rounds' ratios; none where the metric is a plain figure."""
    ratio_min: float | None = None
    ratio_max: float | None = None
    goal: Annotated[str, Field(pattern=f"^{_GOAL.pattern}$")]
    """E.g. `>= 5` or `<= 2.0`: of the ratio, or of `ours` where there is none."""
    holds: bool
    note: str | None = None
    """What the figures do not say, e.g. why there is no peer."""

    @model_validator(mode="after")
    def _consistent(self) -> Metric:
        ratios = (self.ratio, self.ratio_min, self.ratio_max)
        if any(ratio is None for ratio in ratios) and any(ratio is not None for ratio in ratios):
            raise ValueError("ratio, ratio_min and ratio_max must be given together or not at all")
        if (self.ratio is None) != (self.peer is None and self.limit is None):
            raise ValueError("a ratio needs a peer or a limit, and a peer or a limit needs a ratio")
        if self.holds != _met(self.goal, self.ours if self.ratio is None else self.ratio):
            raise ValueError(f"holds is {self.holds}, which the figures contradict (goal {self.goal})")
        return self


class Machine(Frozen):
    """What it was measured on. Never a host's name."""

    cpu: str
    cores: int
    memory_bytes: int


class Result(Frozen):
    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
    metrics: Annotated[dict[str, Metric], Field(min_length=1)]
    rounds: Annotated[int, Field(ge=1)]
    """After the warm-up."""
    versions: dict[str, str]
    machine: Machine
    at: datetime


def compared(
    ours: Sequence[float],
    theirs: Sequence[float],
    *,
    role: Literal["peer", "limit"],
    ratio: Literal["theirs / ours", "ours / theirs"],
    goal: str,
) -> Metric:
    """A metric from one pair of figures a round.

    Raises:
        ValueError: the two differ in number, or there are none.
    """
    if len(ours) != len(theirs) or not ours:
        raise ValueError(f"needs one pair of figures a round, got {len(ours)} of ours and {len(theirs)} of the {role}")
    pairs = list(zip(ours, theirs, strict=True))
    ratios = [b / a for a, b in pairs] if ratio == "theirs / ours" else [a / b for a, b in pairs]
    middle, other = statistics.median(ratios), statistics.median(theirs)
    return Metric(
        ours=statistics.median(ours),
        peer=other if role == "peer" else None,
        limit=other if role == "limit" else None,
        ratio=middle,
        ratio_min=min(ratios),
        ratio_max=max(ratios),
        goal=goal,
        holds=_met(goal, middle),
    )


def figure(ours: Sequence[float], *, goal: str, note: str | None = None) -> Metric:
    """A metric that compares with nothing but its goal."""
    middle = statistics.median(ours)
    return Metric(ours=middle, goal=goal, holds=_met(goal, middle), note=note)


def growth_exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """k where `values` grow like sizes^k: the slope of the least-squares line through their logarithms.

    Raises:
        statistics.StatisticsError: there are fewer than two sizes, or they are all the same.
        ValueError: a size or a value is not above zero, or the two differ in number.
    """
    pairs = [(math.log(size), math.log(value)) for size, value in zip(sizes, values, strict=True)]
    return statistics.linear_regression([x for x, _ in pairs], [y for _, y in pairs]).slope


def publish(
    name: str, metrics: Mapping[str, Metric], *, rounds: int, packages: Sequence[str], whole: bool = True
) -> Result:
    """Print the result as one line of JSON, and keep it in `RESULTS` if it has enough rounds. Losses are kept too.

    `whole`: every metric of the benchmark is there; else it is never kept.
    """
    versions = {"python": platform.python_version(), **{package: version(package) for package in packages}}
    result = Result(
        name=name, metrics=dict(metrics), rounds=rounds, versions=versions, machine=this_machine(), at=_now()
    )
    if whole:
        keep(result, RESULTS)
    else:
        print("not kept: only a part was measured", file=sys.stderr)
    print(result.model_dump_json(), flush=True)
    return result


def keep(result: Result, folder: Path) -> Path | None:
    """Write `folder/NAME.json`, whole or not at all; None, and a word on stderr, for a smoke test."""
    if result.rounds < MIN_ROUNDS:
        print(f"not kept: {result.rounds} rounds, a result needs {MIN_ROUNDS}", file=sys.stderr)
        return None
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result.name}.json"
    half = path.with_suffix(".half")
    half.write_text(result.model_dump_json(indent=2) + "\n", encoding="utf-8")
    half.replace(path)
    return path


def this_machine() -> Machine:
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    model = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    return Machine(
        # ARM kernels give no model name.
        cpu=model[1].strip() if model else platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
    )


def _met(goal: str, value: float) -> bool:
    parsed = _GOAL.fullmatch(goal)
    if parsed is None:
        raise ValueError(f"goal {goal!r} must read like '>= 5' or '<= 2.0'")
    return _HOLDS[parsed[1]](value, float(parsed[2]))


def _now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)
