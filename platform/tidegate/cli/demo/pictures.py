"""`before_after.png` and `timeline.png`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from numpy.typing import NDArray

from tidegate.cli.demo.digits import NAMES
from tidegate.json_lines import read_lines
from tidegate.telemetry.goodput import SPANS, Owner, Span, read_spans

mpl.use("agg")
from matplotlib import pyplot as plt

BIN_S = 2.0

TENANTS: Mapping[str, tuple[str, tuple[Owner, ...]]] = {
    "serving": ("#2a9fd6", (Owner.SERVING, Owner.SERVING_IDLE)),
    "replica starts or drains": ("#a9d8ee", (Owner.STARTING, Owner.DRAINING)),
    "training": ("#3a9a4f", (Owner.PRODUCTIVE, Owner.CHECKPOINT, Owner.FINISHING)),
    "gang forms or restarts": ("#f0c330", (Owner.FORMING, Owner.RESTARTING, Owner.RECOMPUTED)),
    "quarantined": ("#c0392b", (Owner.QUARANTINED,)),
    "free": ("#dddddd", (Owner.FREE,)),
}


def draw_before_after(before: NDArray[np.uint8], after: NDArray[np.uint8], path: Path) -> None:
    """Two rows of ten digits, (10, 8, 8) each: the same prompts and seeds, before and after training."""
    figure, axes = plt.subplots(2, 10, figsize=(8, 2.1), dpi=100)
    for row, (pictures, name) in enumerate(((before, "before"), (after, "after"))):
        for column in range(10):
            axis = axes[row][column]
            axis.imshow(pictures[column], cmap="gray", vmin=0, vmax=255, interpolation="nearest")
            axis.set_xticks([])
            axis.set_yticks([])
            if row == 0:
                axis.set_title(NAMES[column], fontsize=9)
            if column == 0:
                axis.set_ylabel(name, fontsize=9)
    figure.tight_layout(pad=0.4)
    figure.savefig(path)
    plt.close(figure)


def draw_timeline(state_dir: Path, client_log: Path, faults: Sequence[tuple[float, str]], path: Path) -> None:
    """Requests per second by where they were answered, GPUs by tenant, and the faults, over time."""
    answers = list(read_lines(client_log))
    spans = read_spans(state_dir / SPANS)
    begin = min(row["sent_at_s"] for row in answers)
    end = max(row["sent_at_s"] + row["took_s"] for row in answers)
    figure, (above, below) = plt.subplots(2, 1, figsize=(9, 4.6), dpi=100, sharex=True)
    _requests(above, answers, begin, end)
    _gpus(below, spans, begin, end)
    for at_s, name in faults:
        for axis in (above, below):
            axis.axvline(at_s - begin, color="#444444", linewidth=0.8, linestyle="--")
        above.annotate(name, (at_s - begin, 1.0), xycoords=("data", "axes fraction"), fontsize=7, rotation=25)
    below.set_xlabel("seconds")
    below.set_xlim(0, end - begin)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def _requests(axis: Any, answers: Sequence[Mapping[str, Any]], begin: float, end: float) -> None:
    edges = np.arange(0, end - begin + BIN_S, BIN_S)
    series = []
    for kind in ("local/", "provider/"):
        ended = [row["sent_at_s"] + row["took_s"] - begin for row in answers if row["backend"].startswith(kind)]
        series.append(np.histogram(ended, edges)[0] / BIN_S)
    axis.stackplot(edges[:-1], series, labels=["answered here", "spilled"], colors=["#2a9fd6", "#e67e22"], step="post")
    axis.set_ylabel("requests/s")
    axis.legend(loc="upper left", fontsize=7, frameon=False, ncols=2, bbox_to_anchor=(0.0, -0.02))


def _gpus(axis: Any, spans: Sequence[Span], begin: float, end: float) -> None:
    shown = [span for span in spans if span.start_s <= end]
    times = [max(0.0, span.start_s - begin) for span in shown] + [end - begin]
    rows = []
    for _, owners in TENANTS.values():
        counts = [sum(1 for owner in span.owners.values() if owner in owners) for span in shown]
        rows.append([*counts, counts[-1]])
    colors = [color for color, _ in TENANTS.values()]
    axis.stackplot(times, rows, labels=list(TENANTS), colors=colors, step="post")
    axis.set_ylabel("GPUs")
    axis.legend(loc="upper center", fontsize=7, frameon=False, ncols=6, bbox_to_anchor=(0.5, 1.16))
