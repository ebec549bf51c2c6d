"""Make a folder that can be served: from a run's newest good checkpoint, or from fresh weights to try things out.

    python jobs/export_pipeline.py --config jobs/configs/digits.yaml --checkpoint runs/digits --out exports/digits
    python jobs/export_pipeline.py --config jobs/configs/digits.yaml --fresh --out exports/fresh
    python jobs/export_pipeline.py --config jobs/configs/base.yaml --checkpoint runs/base --parts krea2 --out base

--parts names the folder of a whole Krea2Pipeline: with its text encoder, tokenizer, autoencoder and scheduler the
export is one too, and diffusers' `DiffusionPipeline.from_pretrained` loads it.
"""

import argparse
from pathlib import Path

from tidegate.checkpoint.restore import full_model_weights, newest_good
from tidegate.errors import TidegateError
from tidegate.spec.load import load_model
from tidegate.train.config import RunConfig
from tidegate.train.export import write_export
from tidegate.train.export_manifest import export_id
from tidegate.train.model import seeded
from tidegate.train.recipe import Recipe

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--config", type=Path, required=True, help="the run's YAML file")
parser.add_argument("--out", type=Path, required=True, help="the folder to write; an export there is replaced")
parser.add_argument("--parts", type=Path, help="a Krea2Pipeline folder whose other parts to take")
source = parser.add_mutually_exclusive_group(required=True)
source.add_argument("--fresh", action="store_true", help="untrained weights from the config's seed")
source.add_argument("--checkpoint", type=Path, metavar="RUN_DIR", help="the run's directory")
args = parser.parse_args()

try:
    config = load_model(args.config, RunConfig)
except TidegateError as error:
    parser.exit(1, f"error: {error}\n")
if args.fresh:
    step, weights = 0, seeded(config.model, config.seed).state_dict()
else:
    found = newest_good(args.checkpoint / "checkpoints")
    for line in found.skipped:
        print(f"skipped {line}")
    if found.checkpoint is None:
        parser.exit(1, f"error: no good checkpoint in {args.checkpoint}\nhint: --fresh exports untrained weights\n")
    step, weights = found.checkpoint.manifest.step, full_model_weights(found.checkpoint)
try:
    write_export(args.out, config.model, weights, Recipe.of(config), run=config.name, step=step, parts=args.parts)
except TidegateError as error:
    parser.exit(1, f"error: {error}\n")
print(f"{args.out}: {config.name} at step {step}, export {export_id(args.out)}")
