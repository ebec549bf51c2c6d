"""`tidegate data`: look into a prepared data set."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tidegate.cli.options import Json, says_errors

data = typer.Typer(no_args_is_help=True, help="Look into a prepared data set.")


@data.callback()
def group() -> None:
    """Look into a prepared data set."""


@data.command()
@says_errors
def show(
    folder: Annotated[str, typer.Argument(help="What jobs/prepare_data.py wrote: a folder or s3://bucket/path.")],
    step: Annotated[int, typer.Option(min=1, help="The step, as metrics.jsonl and events.jsonl count: from 1.")],
    config: Annotated[Path, typer.Option(help="The run's YAML file: it has the seed and the batch.")],
    as_json: Json = False,
) -> None:
    """The samples of a training step: where each lies, its caption and size. However often the run was resumed."""
    found = samples(folder, step, config)
    if as_json:
        json.dump(found, sys.stdout, indent=2)
        sys.stdout.write("\n")
        return
    table = Table("place", "id", "shard", "row", "size", "caption", title=f"step {step}")
    for row in found:
        place = [str(row[name]) for name in ("position", "id", "shard", "row", "size")]
        table.add_row(*place, row["caption"] + (f"\n{row['short_caption']}" if row["short_caption"] else ""))
    Console().print(table)


def samples(folder: str, step: int, config: Path) -> list[dict[str, Any]]:
    """A row for each sample of the global batch of `step` (from 1).

    Raises:
        PolicyError, DataError: the config or the data set can't be read.
    """
    from tidegate.data.dataset import Dataset
    from tidegate.spec.load import load_model
    from tidegate.train.config import RunConfig

    run = load_model(config, RunConfig)
    image = run.image
    dataset = Dataset(folder, width=image.width, height=image.height, channels=image.channels)
    ids = dataset.ids(run.seed, step - 1, run.global_batch)
    rows = []
    for position, (sample, captions) in enumerate(zip(ids.tolist(), dataset.captions(ids), strict=True)):
        place = dataset.place(sample)
        rows.append(
            {
                "position": position,
                "id": sample,
                "shard": place.shard,
                "row": place.row,
                "size": str(place.size),
                "caption": captions.long,
                "short_caption": captions.short,
            }
        )
    return rows
