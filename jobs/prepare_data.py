"""Make training shards from captioned images, with all CPUs of the cluster.

    ray job submit -- python jobs/prepare_data.py --images s3://bucket/photos --out s3://bucket/shards --resolution 256
    python jobs/prepare_data.py --images photos/ --out data/photos            # on this machine alone

Images come as a folder (metadata.jsonl, or 0001.txt beside 0001.png), as Parquet (image, text), or as WebDataset tars;
on disk or in S3. The output depends on the source and these settings alone. Killed, it goes on where it was when it is
started again. See docs/data.md.
"""

import argparse
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import ray
import ray.data

from tidegate.data.layout import Index, as_text
from tidegate.data.parts import from_bytes, to_bytes
from tidegate.data.preparation import Preparation, Settings
from tidegate.data.sources import Split
from tidegate.errors import DataError
from tidegate.processes import undertaken

MARK = "TIDEGATE_PREPARE"
"""In the environment of a Ray of its own."""

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--images", required=True, help="the source: a folder or s3://bucket/path")
parser.add_argument("--out", required=True, help="folder or s3://bucket/path to write")
parser.add_argument("--seed", type=int, default=0, help="of the global shuffle")
parser.add_argument("--rows-per-shard", type=int, default=8192)
parser.add_argument(
    "--resolution", type=int, help="bring images to about this many pixels squared (default: leave them)"
)
parser.add_argument("--multiple", type=int, default=16, help="of which both sides are multiples (default: %(default)s)")
parser.add_argument("--bucket-aspect-max", type=float, default=2.0, help="the longest bucket; 1: squares alone")
parser.add_argument("--side-min", type=int, default=1, help="reject images whose shorter side has fewer pixels")
parser.add_argument("--aspect-max", type=float, default=4.0, help="reject images that are longer than this")
parser.add_argument("--rows-per-part", type=int, default=1024, help="samples that a kill may cost a worker")
parser.add_argument("--pipeline", help="folder or name of a diffusers pipeline, for the encoders of the next two")
parser.add_argument("--latents", action="store_true", help="store what its autoencoder makes of the images")
parser.add_argument("--text-length", type=int, help="store its text encoder's states, of so many tokens at most")
parser.add_argument("--encode-batch", type=int, default=32, help="images or captions that it encodes at a time")
parser.add_argument("--keep-images", action="store_true", help="store the images beside their latents too")
parser.add_argument(
    "--encoders", type=int, default=1, help="encoders at work at most, each on a GPU where there are any"
)
parser.add_argument("--address", default=os.environ.get("RAY_ADDRESS", "local"), help="a Ray cluster; local: start one")
arguments = parser.parse_args()


# --- settings ---------------------------------------------------------------------------------------------------


def absolute(place: str) -> str:
    """Workers run in other folders."""
    return place if "://" in place else os.path.abspath(place)


settings = Settings(
    source=absolute(arguments.images),
    out=absolute(arguments.out),
    seed=arguments.seed,
    rows_per_shard=arguments.rows_per_shard,
    resolution=arguments.resolution,
    multiple=arguments.multiple,
    bucket_aspect_max=arguments.bucket_aspect_max,
    side_min=arguments.side_min,
    aspect_max=arguments.aspect_max,
    rows_per_part=arguments.rows_per_part,
    pipeline=absolute(arguments.pipeline) if os.path.isdir(arguments.pipeline or "") else arguments.pipeline,
    latents=arguments.latents,
    text_length=arguments.text_length,
    encode_batch=arguments.encode_batch,
    keep_images=arguments.keep_images,
)


# --- what each task does ----------------------------------------------------------------------------------------
# A row of Ray Data's is a whole part: what is kept, and made again after a kill, is never less.


def read_split(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for name, part in Preparation(settings).read(row["number"], row["split"]):
        yield {"name": name, "part": part}


def keep_part(row: dict[str, Any]) -> dict[str, Any]:
    Preparation(settings).keep(row["name"], row["part"])
    return {"name": row["name"]}


class Encode:
    """An actor that holds the encoders."""

    def __init__(self) -> None:
        import torch

        from tidegate.data.encoders import Encoders

        self._encoders = Encoders(
            str(settings.pipeline),
            latents=settings.latents,
            text_length=settings.text_length,
            batch=settings.encode_batch,
            device="cuda" if torch.cuda.is_available() else "cpu",
        )
        Preparation(settings).keep_encoders(*self._encoders.about())

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        part = self._encoders.encode(from_bytes(row["part"]), keep_images=settings.keep_images)
        return {"name": row["name"], "part": to_bytes(part)}


def write_shard(row: dict[str, Any]) -> dict[str, Any]:
    return {"rows": Preparation(settings).write_shard(row["plan"]).rows}


def blocks(count: int) -> int:
    """A task for each item, so that all CPUs have work; Ray keeps a record of each block."""
    return max(1, min(count, 4096))


def remove_leftovers() -> None:
    """Folders of jobs like this one that were killed."""
    for folder in Path("/tmp").glob("tg-*-*"):
        owner = folder.name.split("-")[1]
        if owner.isdigit() and not Path("/proc", owner).exists():
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def connected(address: str) -> Iterator[None]:
    """To a cluster, or to one of our own that goes with us, on ports and in a folder that nobody else has."""
    # Ray's unix sockets lie below; their paths may have 107 characters at most.
    own = tempfile.mkdtemp(prefix=f"tg-{os.getpid()}-", dir="/tmp") if address == "local" else None
    alone = {"include_dashboard": False, "_temp_dir": own} if own is not None else {}
    remove_leftovers()
    with ExitStack() as ending:
        if own is not None:
            ending.callback(shutil.rmtree, own, ignore_errors=True)
            # By itself Ray would go on for a minute after this process was killed.
            ending.enter_context(undertaken(MARK, own))
        ending.callback(ray.shutdown)
        ray.init(address=address, namespace="tidegate", log_to_driver=False, **alone)
        ray.data.DataContext.get_current().enable_progress_bars = False
        yield


# --- the job ----------------------------------------------------------------------------------------------------


def prepare(preparation: Preparation, pending: Mapping[int, Split]) -> Index:
    print(f"{len(pending)} splits to read", flush=True)
    if pending:
        items = [{"number": number, "split": split} for number, split in pending.items()]
        made = ray.data.from_items(items, override_num_blocks=blocks(len(items))).flat_map(read_split)
        if settings.encodes:
            pool = ray.data.ActorPoolStrategy(min_size=1, max_size=arguments.encoders)
            made = made.map(Encode, compute=pool, num_gpus=1 if ray.cluster_resources().get("GPU") else 0)
        print(f"{made.map(keep_part).materialize().count()} parts made", flush=True)
    plans = preparation.plan()
    print(f"{len(plans)} shards to write", flush=True)
    if plans:
        shards = ray.data.from_items([{"plan": plan} for plan in plans], override_num_blocks=blocks(len(plans)))
        shards.map(write_shard).materialize()
    return preparation.finish()


if __name__ == "__main__":
    try:
        job = Preparation(settings)
        todo = job.begin()
        with connected(arguments.address):
            print(f"{arguments.out}: {as_text(prepare(job, todo))}")
    except DataError as error:
        parser.exit(1, f"error: {error}\n")
