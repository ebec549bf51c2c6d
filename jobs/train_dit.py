"""Train a diffusion transformer on the cluster's GPUs, and forget about it.

    ray job submit -- python jobs/train_dit.py --config jobs/configs/digits.yaml --data DATA --run-dir RUNS/digits

The job is a thin client: it files a claim with the arbiter and follows the run. `ray job stop` means: save, then leave.
Submitted again with the same run directory it goes on from the newest checkpoint.
"""

import argparse
import sys
from pathlib import Path

import ray

from tidegate.errors import TidegateError
from tidegate.gang.job import follow_run
from tidegate.spec.load import load_model
from tidegate.train.config import RunConfig

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--config", type=Path, required=True, help="the run's settings, e.g. jobs/configs/digits.yaml")
parser.add_argument("--data", required=True, help="shards made by jobs/prepare_data.py: a folder or s3://bucket/path")
parser.add_argument("--run-dir", type=Path, required=True, help="checkpoints, metrics and the export go here")
parser.add_argument("--gpus", type=int, required=True, help="GPUs to train on")
parser.add_argument("--min-gpus", type=int, help="go on with as few as this when GPUs are evicted (default: half)")
parser.add_argument("--claim-class", default="pretrain", help="a class of policy.yaml (default: %(default)s)")
parser.add_argument("--order", type=int, default=0, help="inside its class the higher goes first (default: 0)")
parser.add_argument("--gpus-per-node", type=int, help="so many of each node (default: whatever each gives)")
parser.add_argument("--one-domain", action="store_true", help="all nodes in one network domain (label tidegate/domain)")
parser.add_argument("--deadline-s", type=float, help="give up when it isn't granted so long after its turn came")
parser.add_argument("--drain-deadline-s", type=float, help="cut off requests on its GPUs that take longer than this")
parser.add_argument("--patience-s", type=float, help="give up when its turn has not come after so long")
arguments = parser.parse_args()

# --- settings ---------------------------------------------------------------------------------------------------

try:
    config = load_model(arguments.config, RunConfig)
except TidegateError as error:
    sys.exit(f"error: {error}")

# --- the run ----------------------------------------------------------------------------------------------------

ray.init(address="auto", namespace="tidegate", log_to_driver=False)
try:
    code = follow_run(
        config,
        arguments.data if "://" in arguments.data else str(Path(arguments.data).resolve()),
        arguments.run_dir.resolve(),
        max_gpus=arguments.gpus,
        min_gpus=arguments.min_gpus or (arguments.gpus + 1) // 2,
        claim_class=arguments.claim_class,
        say=lambda line: print(line, flush=True),
        order=arguments.order,
        gpus_per_node=arguments.gpus_per_node,
        one_domain=arguments.one_domain,
        deadline_s=arguments.deadline_s,
        drain_deadline_s=arguments.drain_deadline_s,
        patience_s=arguments.patience_s,
    )
except TidegateError as error:
    sys.exit(f"error: {error}")
sys.exit(code)
