"""Who owned each GPU-second. Pure, but for `SpanBook`'s file.

A span says who has each GPU from `start_s` on; the arbiter writes one line whenever that changes. Summed up, the owners
of an interval add to its GPU-seconds exactly. While no arbiter looks (it crashed, its host was down) nobody knows: from
the last look to the first one of the next arbiter the owner is `unknown`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import IO, Any

from tidegate.json_lines import cut_torn_line, read_lines

SPANS = "gpu_owners.jsonl"
"""The file's name in the arbiter's state directory."""


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
    UNKNOWN = "unknown"
    """No arbiter looked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The owners of all GPUs from `start_s` until the next span begins."""

    start_s: float
    owners: Mapping[str, Owner]
    """GPU -> owner. The arbiter does not know which of a node's GPUs a replica has: counts are exact, names are not."""


@dataclass(slots=True)
class SpanBook:
    """Writes a line for each change of ownership. The file's modification time is that of the newest look, so that the
    next arbiter knows since when nobody has looked."""

    path: Path | None = None
    _last: Span | None = field(init=False, default=None)
    _file: IO[str] | None = field(init=False, default=None)

    def observe(self, now: Mapping[str, Owner], now_s: float) -> None:
        if self.path is not None and self._file is None:
            self._file = self._take_over(self.path, now_s)
        if self._last is None or self._last.owners != dict(now):
            self._last = Span(start_s=now_s, owners=dict(now))
            self._write(self._last)
        if self.path is not None:
            os.utime(self.path, (now_s, now_s))

    def _take_over(self, path: Path, now_s: float) -> IO[str]:
        """Go on with another arbiter's file: what lies between its last look and now is nobody's knowledge."""
        path.parent.mkdir(parents=True, exist_ok=True)
        before = read_spans(path)
        seen_s = min(looked_until_s(path), now_s)
        cut_torn_line(path)
        file = self._file = path.open("a", encoding="utf-8")
        if before and seen_s < now_s:
            gap_s = max(seen_s, before[-1].start_s)
            self._write(Span(start_s=gap_s, owners=dict.fromkeys(before[-1].owners, Owner.UNKNOWN)))
        return file

    def _write(self, span: Span) -> None:
        if self._file is not None:
            self._file.write(json.dumps({"start_s": span.start_s, "owners": dict(span.owners)}) + "\n")
            self._file.flush()

    def current(self) -> tuple[Span, ...]:
        return (self._last,) if self._last is not None else ()


def read_spans(path: Path) -> tuple[Span, ...]:
    """The spans of a file, in order; a torn last line is left out."""
    return tuple(
        Span(start_s=row["start_s"], owners={gpu: Owner(name) for gpu, name in row["owners"].items()})
        for row in read_lines(path)
    )


def looked_until_s(path: Path) -> float:
    """When an arbiter looked last; 0 where none ever did."""
    return path.stat().st_mtime if path.exists() else 0.0


def gpu_seconds(
    spans: Iterable[Span], start_s: float, end_s: float, gpus: Collection[str] | None = None
) -> dict[Owner, float]:
    """GPU-seconds by owner between two times, of all GPUs or of some; seconds before the first span are nobody's."""
    total = dict.fromkeys(Owner, 0.0)
    ordered = list(spans)
    for span, after in zip(ordered, [*ordered[1:], None], strict=True):
        begin = max(span.start_s, start_s)
        end = min(after.start_s if after is not None else end_s, end_s)
        if end > begin:
            for gpu, owner in span.owners.items():
                if gpus is None or gpu in gpus:
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


def stalled_s(commits: Iterable[Mapping[str, Any]]) -> float:
    """GPU-seconds that ranks waited for checkpoints, by the lines of a run's `checkpoints.jsonl`."""
    return float(sum(row["stall_s"] * row["world_size"] for row in commits))


def fractions(total: Mapping[Owner, float]) -> dict[str, float]:
    """Owners' shares of the GPU-seconds; they add to 1.

    Raises:
        ValueError: there are no GPU-seconds to share.
    """
    whole = sum(total.values())
    if whole <= 0:
        raise ValueError("no GPU-seconds between these times")
    return {str(owner): amount / whole for owner, amount in total.items()}
