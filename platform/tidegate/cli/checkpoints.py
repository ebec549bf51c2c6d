"""`tidegate checkpoint`: look at kept checkpoints, check them, prune, compare and pin them. Needs no cluster."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from tidegate.cli.options import Json, says_errors

if TYPE_CHECKING:
    from tidegate.checkpoint.places import Place
    from tidegate.checkpoint.scrub import Look
    from tidegate.checkpoint.tiers import Candidate, Tier

checkpoint = typer.Typer(
    name="checkpoint", no_args_is_help=True, help="Kept checkpoints: list, verify, prune, compare and pin them."
)

Where = Annotated[
    str, typer.Argument(metavar="RUN", help="A run's directory (its `--run-dir`), or s3://bucket/prefix.")
]
Which = Annotated[str, typer.Argument(metavar="STEP", help="A step, or a checkpoint's name as `list` shows it.")]
Endpoint = Annotated[str, typer.Option(help="URL of an S3 that isn't Amazon's; a run's directory knows its own.")]


def _places(where: str, endpoint: str) -> tuple[Place, ...]:
    """Where checkpoints are kept for long."""
    from tidegate.checkpoint.address import is_address
    from tidegate.checkpoint.places import disk_of
    from tidegate.checkpoint.store_file import read_store_file

    if is_address(where):
        return (_store(where, endpoint or None),)
    disk, store = disk_of(Path(where)), read_store_file(Path(where))
    return (disk,) if store is None else (disk, _store(store.store, endpoint or store.endpoint))


def _store(address: str, endpoint: str | None) -> Place:
    from tidegate.checkpoint.address import parse_address
    from tidegate.checkpoint.object_store import ObjectStore
    from tidegate.errors import CheckpointError

    try:
        return ObjectStore(parse_address(address), endpoint)
    except ValueError as error:
        raise CheckpointError(str(error)) from None


def _tiers(where: str, endpoint: str) -> tuple[Tier, ...]:
    """All that there is, copies in this machine's memory too."""
    from tidegate.checkpoint.address import is_address
    from tidegate.checkpoint.places import memory_of

    places = _places(where, endpoint)
    return places if is_address(where) else (*memory_of(Path(where)), *places)


def _one(what: str, endpoint: str) -> tuple[Place, Candidate]:
    """What `diff` is told to compare: RUN or RUN@STEP."""
    from tidegate.checkpoint.scrub import State, look, named
    from tidegate.errors import CheckpointError

    where, _, which = what.partition("@")
    good = [
        (place, found.candidate)
        for place in _places(where, endpoint)
        for found in look(place)
        if found.state is State.GOOD
    ]
    if good:
        there = [candidate for _, candidate in good]
        wanted = named(there, which) if which else max(there)
        return good[there.index(wanted)]
    raise CheckpointError(f"{what}: no good checkpoint\nhint: `tidegate checkpoint list {where}` says why")


def _print_json(found: object) -> None:
    json.dump(found, sys.stdout, indent=2)
    sys.stdout.write("\n")


@checkpoint.command("list")
@says_errors
def list_(where: Where, endpoint: Endpoint = "", as_json: Json = False) -> None:
    """All checkpoints of a run in every tier: step, generation, size, age, and why one is not good.

    Sizes are checked, content is not: that is `verify`. Exit code 1 when a tier cannot be looked through.
    """
    from tidegate.checkpoint.scrub import look
    from tidegate.cli.checkpoint_tables import look_rows, look_table

    looks, problems = _each(_tiers(where, endpoint), look)
    if as_json:
        _print_json(look_rows(looks, time.time()))
    else:
        Console().print(look_table(looks, time.time()))
    _say_problems(problems)


@checkpoint.command()
@says_errors
def verify(where: Where, endpoint: Endpoint = "", as_json: Json = False) -> None:
    """Read and hash every byte of every checkpoint on disk and in the store.

    Exit code 1 when a committed one is not what its manifest says, or when none is good.
    """
    from tidegate.checkpoint.scrub import State, scrub
    from tidegate.cli.checkpoint_tables import look_line, look_rows

    def read(tier: Tier) -> Iterator[Look]:
        for found in scrub(tier):
            if not as_json:
                _lines().print(look_line(found))
            yield found

    looks, problems = _each(_places(where, endpoint), read)
    if as_json:
        _print_json(look_rows(looks, time.time()))
    states = {found.state for found in looks}
    if State.GOOD not in states:
        problems.append("no good checkpoint")
    _say_problems(problems)
    if State.BAD in states:
        raise typer.Exit(1)


@checkpoint.command()
@says_errors
def prune(
    where: Where,
    keep: Annotated[int, typer.Option(min=1, help="Good ones to leave in each tier.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    endpoint: Endpoint = "",
) -> None:
    """Delete old checkpoints, and torn ones that something newer and good has outdated.

    The newest one whose content verifies always stays, and so does all that is pinned or newer.
    """
    from tidegate.checkpoint.scrub import to_prune
    from tidegate.cli.checkpoint_tables import look_line

    for place in _places(where, endpoint):
        for found in to_prune(place, keep):
            if not dry_run:
                place.remove(found.candidate)
            _lines().print(f"{'would delete' if dry_run else 'deleted'} {look_line(found)}")


@checkpoint.command()
@says_errors
def diff(
    one: Annotated[str, typer.Argument(metavar="A", help="RUN for its newest good one, or RUN@STEP.")],
    other: Annotated[str, typer.Argument(metavar="B", help="The same.")],
    endpoint: Endpoint = "",
    all_: Annotated[bool, typer.Option("--all", help="Tensors that are equal too.")] = False,
    as_json: Json = False,
) -> None:
    """Compare two checkpoints tensor by tensor: largest absolute difference, changed shapes and types.

    They may have been written by any number of ranks. Exit code 1 when they differ.
    """
    from tidegate.checkpoint.difference import differences
    from tidegate.cli.checkpoint_tables import difference_rows, difference_table

    left, right = _one(one, endpoint), _one(other, endpoint)
    with left[0].source(left[1]) as source_a, right[0].source(right[1]) as source_b:
        sides = ((source_a, left[0].manifest(left[1])), (source_b, right[0].manifest(right[1])))
        found = list(differences(*sides))
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
    endpoint: Endpoint = "",
) -> None:
    """Keep a checkpoint whatever the policy says, in every tier that keeps it for long."""
    from tidegate.checkpoint.marks import Mark

    for place, candidate in _meant(where, which, endpoint):
        place.mark(candidate, Mark.PINNED, reason)
        typer.echo(f"{place.label}: {candidate.name} is pinned")


@checkpoint.command()
@says_errors
def unpin(where: Where, which: Which, endpoint: Endpoint = "") -> None:
    """Leave a pinned checkpoint to the policy again."""
    from tidegate.checkpoint.marks import Mark

    for place, candidate in _meant(where, which, endpoint):
        place.unmark(candidate, Mark.PINNED)
        typer.echo(f"{place.label}: {candidate.name} is not pinned")


def _meant(where: str, which: str, endpoint: str) -> list[tuple[Place, Candidate]]:
    from tidegate.checkpoint.scrub import named

    places = [(place, candidate) for place in _places(where, endpoint) for candidate in place.candidates()]
    chosen = named([candidate for _, candidate in places], which)
    return [(place, candidate) for place, candidate in places if candidate == chosen]


def _each(tiers: Sequence[Tier], read: Callable[[Tier], Iterable[Look]]) -> tuple[list[Look], list[str]]:
    """What is read of each; one that cannot be looked through keeps nobody from seeing the others."""
    from tidegate.errors import CheckpointError

    looks, problems = [], []
    for tier in tiers:
        try:
            for found in read(tier):
                looks.append(found)
        except CheckpointError as error:
            problems.append(f"{tier.label}: {error}")
    return looks, problems


def _say_problems(problems: list[str]) -> None:
    for problem in problems:
        _lines(stderr=True).print(f"error: {problem}")
    if problems:
        raise typer.Exit(1)


def _lines(*, stderr: bool = False) -> Console:
    return Console(stderr=stderr, highlight=False, soft_wrap=True, markup=False)
