"""Train without a cluster:

torchrun --nproc-per-node 2 -m tidegate.train --config jobs/configs/digits.yaml --data data/digits --run-dir runs/digits
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from pathlib import Path
from types import FrameType

from tidegate.errors import TidegateError
from tidegate.spec.load import load_model
from tidegate.train.config import RunConfig
from tidegate.train.loop import run
from tidegate.train.progress import NullProgress


class StopOnSignal(NullProgress):
    """SIGTERM and SIGINT mean: save, then leave."""

    def __init__(self) -> None:
        self._asked = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = True

    def stop_requested(self) -> bool:
        return self._asked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--data", required=True, help="what jobs/prepare_data.py wrote: a folder or s3://bucket/path")
    parser.add_argument("--run-dir", type=Path, required=True, help="checkpoints, records and the export go here")
    parser.add_argument("--generation", type=int, default=0, help="raise it with every restart")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    try:
        run(load_model(args.config, RunConfig), args.data, args.run_dir, StopOnSignal(), generation=args.generation)
    except TidegateError as error:
        sys.exit(str(error))


main()
