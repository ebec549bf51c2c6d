"""`python -m tidegate.train.drill_process RUN_DIR`: drill the newest checkpoint of each place of a run, once.

A line of JSON for each (`Drilled`). It takes one CPU when nobody else wants it, memory for the network's weights and
some of its moments, and no GPU.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from tidegate.checkpoint.background import give_way, own_output
from tidegate.checkpoint.where import places_of
from tidegate.errors import TidegateError
from tidegate.train.config_file import read_config
from tidegate.train.drill import drill_places


def main() -> None:
    say = own_output()
    give_way()
    torch.set_num_threads(1)
    run_dir = sys.argv[1]
    try:
        for drilled in drill_places(Path(run_dir), places_of(run_dir), read_config(Path(run_dir))):
            say(drilled.model_dump_json())
    except TidegateError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
