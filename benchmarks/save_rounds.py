"""What the benchmarks of checkpoints share: contenders in processes of their own, in turn, in the same folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.arena import ROOT

TORCHSNAPSHOT = ("torchsnapshot==0.1.0", "aiofiles==25.1.0", "nest-asyncio==1.6.0")
"""A peer that the product has no use for: into a folder of its own, beside the same torch."""

FOLDER_VARIABLE = "TIDEGATE_BENCH_DIR"
"""Names the directory that is measured; without it the system's own for temporary files."""


def last_line(module: str, arguments: Sequence[str], path: Sequence[Path] = ()) -> dict[str, float]:
    """Run `python -m module` and read its last line.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    inherited = os.environ.get("PYTHONPATH")
    parts = [str(ROOT), *map(str, path), *([inherited] if inherited else [])]
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(parts), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def torchsnapshot_folder(root: Path) -> Path:
    """Install the peer below `root`."""
    folder = root / "installed"  # each contender's own folder is removed after its saves
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *TORCHSNAPSHOT]
    subprocess.run(command, check=True)
    return folder


def saves(contenders: Sequence[str], rounds: int, measure: str) -> dict[str, list[dict[str, float]]]:
    """What `measure` tells of each contender in each round, after one of warm-up (none where there is only one)."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-", dir=os.environ.get(FOLDER_VARIABLE)) as name:
        root = Path(name)
        path = [torchsnapshot_folder(root)] if "torchsnapshot" in contenders else []
        for number in range(0 if rounds > 1 else 1, rounds + 1):
            for contender in contenders:
                folder = root / contender
                options = ("--contender", contender, "--measure", measure, "--folder", str(folder))
                took = last_line("benchmarks.contenders.saves", options, path)
                shutil.rmtree(folder, ignore_errors=True)
                shown = ", ".join(f"{key} {value:.3f}" for key, value in took.items() if key != "bytes")
                print(f"round {number or 'warm-up'}, {contender}: {shown}", flush=True)
                if number:
                    found[contender].append(took)
    return found


def column(rounds: Sequence[Mapping[str, float]], name: str) -> list[float]:
    return [figures[name] for figures in rounds]


def best(rounds_of: Mapping[str, Sequence[Mapping[str, float]]], peers: Sequence[str], name: str) -> list[float]:
    """In each round the least of the peers' figures."""
    return [min(figures) for figures in zip(*(column(rounds_of[peer], name) for peer in peers), strict=True)]


def gigabytes_a_second(rounds: Sequence[Mapping[str, float]], name: str) -> list[float]:
    return [figures["bytes"] / figures[name] / 1e9 for figures in rounds]
