"""Bring a run's newest checkpoints to life, on disk and in its object store, and compare; exit code 1 where one is bad.

    ray job submit --entrypoint-num-cpus 1 -- python jobs/checkpoint_drill.py RUNS/digits

For a scheduler (cron, a nightly job). While a run trains, `checkpoint.drill_every_s` in its config does the same. What
fails is marked bad, so that no restore takes it; `RUN/drills.jsonl` has a line for each drill.
"""

import argparse
from pathlib import Path

from tidegate.checkpoint.background import give_way
from tidegate.checkpoint.where import places_of
from tidegate.errors import TidegateError
from tidegate.spec.load import load_model
from tidegate.train.config import RunConfig
from tidegate.train.config_file import read_config
from tidegate.train.drill import drill_places
from tidegate.train.drilled import as_text

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("run_dir", type=Path, help="the run's directory")
parser.add_argument("--config", type=Path, help="the run's YAML file (default: as its newest generation has noted it)")
args = parser.parse_args()

give_way()
try:
    config = read_config(args.run_dir) if args.config is None else load_model(args.config, RunConfig)
    results = []
    for drilled in drill_places(args.run_dir, places_of(str(args.run_dir)), config):
        print(as_text(drilled), flush=True)
        results.append(drilled)
except TidegateError as error:
    parser.exit(1, f"error: {error}\n")
parser.exit(int(any(drilled.problem is not None for drilled in results)))
