"""Make training shards from a folder of captioned images.

    python jobs/prepare_data.py --images photos/ --out data/photos --seed 0 --rows-per-shard 10000

`photos/metadata.jsonl` has one line per image: {"file_name": "0001.png", "text": "a caption"}.
"""

import argparse
from pathlib import Path

from tidegate.data.layout import as_text
from tidegate.data.prepare import prepare
from tidegate.errors import DataError

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--images", type=Path, required=True, help="folder with the images and metadata.jsonl")
parser.add_argument("--out", type=Path, required=True, help="folder to write; must not exist")
parser.add_argument("--seed", type=int, default=0, help="of the global shuffle")
parser.add_argument("--rows-per-shard", type=int, default=10_000)
args = parser.parse_args()

try:
    index = prepare(args.images, args.out, seed=args.seed, rows_per_shard=args.rows_per_shard)
except DataError as error:
    parser.exit(1, f"error: {error}\n")
print(f"{args.out}: {as_text(index)}")
