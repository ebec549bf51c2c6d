"""Who owned each GPU-second. Pure, but for `SpanBook`'s file.

A span says that `gpus` GPUs belonged to `owner` from `start_s` on; the arbiter writes one line whenever that changes.
Summed up, the owners of an interval add to its GPU-seconds exactly.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import IO


class Owner(StrEnum):
    PRODUCTIVE = "productive"
    RECOMPUTED = "recomputed"
    RESTARTING = "restarting"
    CHECKPOINT = "checkpoint"
    FORMING = "forming"
    """Granted to a gang that has not made its first step."""
    FINISHING = "finishing"
    DRAINING = "draining"
    SERVING = "serving"
    SERVING_IDLE = "serving_idle"
    """Held by a replica that computes nothing at the moment."""
    STARTING = "starting"
    """Held by a replica that is not ready yet."""
    QUARANTINED = "quarantined"
    FREE = "free"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The owners of all GPUs from `start_s` until the next span begins."""

    start_s: float
    owners: Mapping[str, Owner]
    """GPU -> owner. The arbiter does not know which of a node's GPUs a replica has: counts are exact, names are not."""


@dataclass(slots=True)
class SpanBook:
    """Writes a line for each change of ownership."""

    path: Path | None = None
    _last: Span | None = field(init=False, default=None)
    _file: IO[str] | None = field(init=False, default=None)

    def observe(self, now: Mapping[str, Owner], now_s: float) -> None:
        if self._last is not None and self._last.owners == dict(now):
            return
        self._last = Span(start_s=now_s, owners=dict(now))
        if self.path is not None:
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self.path.open("a", encoding="utf-8")
            self._file.write(json.dumps({"start_s": now_s, "owners": dict(now)}) + "\n")
            self._file.flush()

    def current(self) -> tuple[Span, ...]:
        return (self._last,) if self._last is not None else ()


def read_spans(path: Path) -> tuple[Span, ...]:
    """The spans of a file, in order; a torn last line is left out."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return tuple(
        Span(start_s=row["start_s"], owners={gpu: Owner(name) for gpu, name in row["owners"].items()}) for row in rows
    )


def gpu_seconds(spans: Iterable[Span], start_s: float, end_s: float) -> dict[Owner, float]:
    """GPU-seconds by owner between two times. Seconds before the first span count for nobody."""
    total = dict.fromkeys(Owner, 0.0)
    ordered = list(spans)
    for span, after in zip(ordered, [*ordered[1:], None], strict=True):
        begin = max(span.start_s, start_s)
        end = min(after.start_s if after is not None else end_s, end_s)
        if end > begin:
            for owner in span.owners.values():
                total[owner] += end - begin
    return total


def refine(total: Mapping[Owner, float], serving_s: float, checkpoint_s: float) -> dict[Owner, float]:
    """Move what finer records know: replicas' compute seconds out of idle, checkpoint stalls out of productive."""
    refined = dict(total)
    for source, target, amount in (
        (Owner.SERVING_IDLE, Owner.SERVING, serving_s),
        (Owner.PRODUCTIVE, Owner.CHECKPOINT, checkpoint_s),
    ):
        moved = min(amount, refined.get(source, 0.0))
        refined[source] = refined.get(source, 0.0) - moved
        refined[target] = refined.get(target, 0.0) + moved
    return refined


def fractions(total: Mapping[Owner, float]) -> dict[str, float]:
    """Owners' shares of the GPU-seconds; they add to 1.

    Raises:
        ValueError: there are no GPU-seconds to share.
    """
    whole = sum(total.values())
    if whole <= 0:
        raise ValueError("no GPU-seconds between these times")
    return {str(owner): amount / whole for owner, amount in total.items()}
