"""One rank of a peer: the same loop; its generation is counted from the checkpoints, its process written down."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from tidegate.checkpoint.manifest import parse_name
from tidegate.spec.load import load_model
from tidegate.train.config import RunConfig

PIDS = "pids"
"""Folder in the run's directory: a file `GENERATION-RANK` for each rank, holding its process id and its node."""


def train(config: RunConfig, data: Path, run_dir: Path, rank: int, node: str = "") -> None:
    """Needs torchrun's environment variables."""
    from tidegate.train.loop import run
    from tidegate.train.progress import NullProgress

    # Nobody counts restarts here. The newest checkpoint's generation is older than ours, and the same for all ranks:
    # none is written before they have met.
    names = [parse_name(path.name) for path in (run_dir / "checkpoints").glob("*")]
    generation = 1 + max((name[1] for name in names if name is not None), default=0)
    (run_dir / PIDS).mkdir(parents=True, exist_ok=True)
    noted = run_dir / PIDS / f"{generation}-{rank}"
    noted.write_text(json.dumps({"pid": os.getpid(), "node": node}), encoding="utf-8")
    run(config, data, run_dir, NullProgress(), generation=generation)


def main() -> None:
    """Under torchrun."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    arguments = parser.parse_args()
    config = load_model(arguments.config, RunConfig)
    train(config, arguments.data, arguments.run_dir, int(os.environ["RANK"]))


if __name__ == "__main__":
    main()
