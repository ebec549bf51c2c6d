"""Average the weights of several checkpoints of a run (PMA), and write them as a folder that can be served.

    python jobs/average_checkpoints.py --config jobs/configs/digits.yaml --run-dir runs/digits --last 3 --out pma
    python jobs/average_checkpoints.py ... --checkpoint step-00000380.g1 --checkpoint step-00000400.g1 --out pma

How many lie on disk is `checkpoint.keep` in the run's config. A run of latents needs --parts, as in export_pipeline.py.
"""

import argparse
from pathlib import Path

from tidegate.errors import TidegateError
from tidegate.spec.load import load_model
from tidegate.train.averaging import mean_weights, named, newest
from tidegate.train.config import RunConfig
from tidegate.train.export import write_export
from tidegate.train.export_manifest import export_id
from tidegate.train.recipe import Recipe

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--config", type=Path, required=True, help="the run's YAML file")
parser.add_argument("--run-dir", type=Path, required=True, help="the run's directory")
parser.add_argument("--out", type=Path, required=True, help="the folder to write; an export there is replaced")
parser.add_argument("--parts", type=Path, help="a Krea2Pipeline folder whose other parts to take")
which = parser.add_mutually_exclusive_group(required=True)
which.add_argument("--last", type=int, metavar="N", help="the newest N good ones")
which.add_argument("--checkpoint", action="append", metavar="NAME", help="this one; may be given several times")
args = parser.parse_args()
if args.last is not None and args.last < 1:
    parser.error(f"--last must be at least 1, got {args.last}")

try:
    config = load_model(args.config, RunConfig)
    folder = args.run_dir / "checkpoints"
    chosen, skipped = newest(folder, args.last) if args.last else (named(folder, args.checkpoint), [])
    for line in skipped:
        print(f"skipped {line}")
    step = max(checkpoint.manifest.step for checkpoint in chosen)
    weights = mean_weights(chosen)
    write_export(args.out, config.model, weights, Recipe.of(config), run=config.name, step=step, parts=args.parts)
except TidegateError as error:
    parser.exit(1, f"error: {error}\n")
steps = ", ".join(str(checkpoint.manifest.step) for checkpoint in chosen)
print(f"{args.out}: {config.name}, the mean of steps {steps}, export {export_id(args.out)}")
