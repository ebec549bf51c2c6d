"""Run benchmarks: those named, or all of them and then a table. The last line printed is one JSON object: the result,
or, of several, each result by its name.

python benchmarks/run.py fault_to_step
python benchmarks/run.py --rounds 1        # a smoke test of each
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
# As a script, this file's own folder is on the path, and the benchmarks import each other from the root.
sys.path.insert(0, str(ROOT))

from benchmarks.contract import Result  # noqa: E402

NAMES = (
    "decide",
    "judge",
    "replay",
    "spill_decision",
    "gateway",
    "flip_latency",
    "engine",
    "flip",
    "fault_to_step",
    "steady_tax",
    "loader",
    "agent_cost",
    "hot_gpu",
    "checkpoint_stall",
    "checkpoint_drain",
    "checkpoint_save",
    "checkpoint_restore",
)
WITH_GPU = ("h200",)
"""Only by name: they need what most machines lack."""


def run(name: str, options: Sequence[str]) -> Result:
    """Run one benchmark, its output as it comes; its result is the last line.

    Raises:
        subprocess.CalledProcessError: it failed.
        pydantic.ValidationError: its last line is not what the contract says.
    """
    command = [sys.executable, "-m", f"benchmarks.{name}", *options]
    last = ""
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line
    if process.returncode != 0:
        raise subprocess.CalledProcessError(process.returncode, command)
    return Result.model_validate_json(last)


def table(results: Sequence[Result]) -> Table:
    shown = Table("benchmark", "metric", "ours", "peer", "limit", "ratio (range)", "goal", "holds")
    for result in results:
        for name, metric in result.metrics.items():
            ratio = (
                "" if metric.ratio is None else f"{metric.ratio:.2f} ({metric.ratio_min:.2f}-{metric.ratio_max:.2f})"
            )
            figures = [_number(metric.ours), _number(metric.peer), _number(metric.limit), ratio]
            shown.add_row(result.name, name, *figures, metric.goal, "yes" if metric.holds else "no")
    return shown


def notes(results: Sequence[Result]) -> list[str]:
    return [
        f"{result.name} {name}: {metric.note}"
        for result in results
        for name, metric in result.metrics.items()
        if metric.note is not None
    ]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = f"{', '.join(NAMES)} (default: all of these), {', '.join(WITH_GPU)}"
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {known}")
    parser.add_argument("--rounds", type=int, help="handed on to each")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.names) - {*NAMES, *WITH_GPU})
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; known: {known}")
    names = arguments.names or list(NAMES)
    options = [] if arguments.rounds is None else ["--rounds", str(arguments.rounds)]
    results, failed = [], []
    for name in names:
        try:
            results.append(run(name, options))
        except (subprocess.CalledProcessError, ValidationError) as error:
            failed.append(f"{name}: {error}")
    if len(names) > 1:
        Console().print(table(results), *notes(results), sep="\n")
        print(json.dumps({result.name: result.model_dump(mode="json") for result in results}), flush=True)
    if failed:
        sys.exit("\n".join(f"error: {line}" for line in failed))


if __name__ == "__main__":
    main()
