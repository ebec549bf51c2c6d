"""`tidegate checkpoint`: look at kept checkpoints, check them, prune, compare and pin them. Needs no cluster."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from tidegate.cli.options import Json, says_errors

if TYPE_CHECKING:
    from tidegate.checkpoint.places import Place
    from tidegate.checkpoint.tiers import Candidate

checkpoint = typer.Typer(
    name="checkpoint", no_args_is_help=True, help="Kept checkpoints: list, verify, prune, compare and pin them."
)

Where = Annotated[str, typer.Argument(metavar="RUN", help="A run's directory (its `--run-dir`).")]
Which = Annotated[str, typer.Argument(metavar="STEP", help="A step, or a checkpoint's name as `list` shows it.")]


def _places(where: str) -> tuple[Place, ...]:
    from tidegate.checkpoint.places import disk_of

    return (disk_of(Path(where)),)


def _one(what: str) -> tuple[Place, Candidate]:
    """What `diff` is told to compare."""
    from tidegate.checkpoint.scrub import State, look, named
    from tidegate.errors import CheckpointError

    where, _, which = what.partition("@")
    looks = [found for place in _places(where) for found in look(place)]
    good = [found for found in (named(looks, which) if which else looks) if found.state is State.GOOD]
    if not good:
        raise CheckpointError(f"{what}: no good checkpoint\nhint: `tidegate checkpoint list {where}` says why")
    newest = max(good, key=lambda found: found.candidate)
    return newest.place, newest.candidate


def _print_json(found: object) -> None:
    json.dump(found, sys.stdout, indent=2)
    sys.stdout.write("\n")


@checkpoint.command("list")
@says_errors
def list_(where: Where, as_json: Json = False) -> None:
    """All checkpoints of a run in every place: step, generation, size, age, and why one is not good.

    Sizes are checked, content is not: that is `verify`.
    """
    from tidegate.checkpoint.scrub import look
    from tidegate.cli.checkpoint_tables import look_rows, look_table

    looks = [found for place in _places(where) for found in look(place)]
    if as_json:
        _print_json(look_rows(looks, time.time()))
    else:
        Console().print(look_table(looks, time.time()))


@checkpoint.command()
@says_errors
def verify(where: Where, as_json: Json = False) -> None:
    """Read and hash every byte of every checkpoint. Exit code 1 when a committed one is not what its manifest says, or
    when none is good."""
    from tidegate.checkpoint.scrub import State, scrub
    from tidegate.cli.checkpoint_tables import look_line, look_rows

    looks = []
    for place in _places(where):
        for found in scrub(place):
            looks.append(found)
            if not as_json:
                Console(highlight=False, soft_wrap=True, markup=False).print(look_line(found))
    if as_json:
        _print_json(look_rows(looks, time.time()))
    states = {found.state for found in looks}
    if State.BAD in states or State.GOOD not in states:
        if not as_json and State.GOOD not in states:
            typer.echo("no good checkpoint")
        raise typer.Exit(1)


@checkpoint.command()
@says_errors
def prune(
    where: Where,
    keep: Annotated[int, typer.Option(min=1, help="Good ones to leave in each place.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
) -> None:
    """Delete old checkpoints, and torn ones that something newer and good has outdated.

    The newest one whose content verifies always stays, and so does all that is pinned or newer.
    """
    from tidegate.checkpoint.scrub import to_prune
    from tidegate.cli.checkpoint_tables import look_line

    console = Console(highlight=False, soft_wrap=True, markup=False)
    for place in _places(where):
        for found in to_prune(place, keep):
            if not dry_run:
                place.remove(found.candidate)
            console.print(f"{'would delete' if dry_run else 'deleted'} {look_line(found)}")


@checkpoint.command()
@says_errors
def diff(
    one: Annotated[str, typer.Argument(metavar="A", help="RUN for its newest good one, or RUN@STEP.")],
    other: Annotated[str, typer.Argument(metavar="B", help="The same.")],
    all_: Annotated[bool, typer.Option("--all", help="Tensors that are equal too.")] = False,
    as_json: Json = False,
) -> None:
    """Compare two checkpoints tensor by tensor: largest absolute difference, changed shapes and types.

    They may have been written by any number of ranks. Exit code 1 when they differ.
    """
    from tidegate.checkpoint.difference import differences
    from tidegate.cli.checkpoint_tables import difference_rows, difference_table

    left, right = _one(one), _one(other)
    with (
        TemporaryDirectory(prefix="tidegate-") as cache,
        left[0].folder(left[1], Path(cache)) as folder_a,
        right[0].folder(right[1], Path(cache)) as folder_b,
    ):
        found = list(differences((folder_a, left[0].manifest(left[1])), (folder_b, right[0].manifest(right[1]))))
    different = [row for row in found if not row.same]
    if as_json:
        _print_json(difference_rows(found if all_ else different))
    elif different or all_:
        Console().print(difference_table(found if all_ else different))
    if not as_json:
        typer.echo(f"{len(different)} of {len(found)} tensors differ")
    if different:
        raise typer.Exit(1)


@checkpoint.command()
@says_errors
def pin(
    where: Where,
    which: Which,
    reason: Annotated[str, typer.Option(help="Stands in `list`.")] = "pinned by a person",
) -> None:
    """Keep a checkpoint whatever the policy says, in every place that has it."""
    from tidegate.checkpoint.marks import Mark
    from tidegate.checkpoint.scrub import look, named

    for found in named([found for place in _places(where) for found in look(place)], which):
        found.place.mark(found.candidate, Mark.PINNED, reason)
        typer.echo(f"{found.place.label}: {found.candidate.name} is pinned")


@checkpoint.command()
@says_errors
def unpin(where: Where, which: Which) -> None:
    """Leave a pinned checkpoint to the policy again."""
    from tidegate.checkpoint.marks import Mark
    from tidegate.checkpoint.scrub import look, named

    for found in named([found for place in _places(where) for found in look(place)], which):
        found.place.unmark(found.candidate, Mark.PINNED)
        typer.echo(f"{found.place.label}: {found.candidate.name} is not pinned")
