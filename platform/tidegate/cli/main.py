"""The `tidegate` command."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, ParamSpec, TypeVar

import typer
from rich.console import Console

from tidegate.errors import TidegateError
from tidegate.ids import Tier

app = typer.Typer(
    name="tidegate",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    add_completion=False,
    help="""One Ray cluster that trains a diffusion transformer and serves it.

A training claim takes serving's GPUs; the overflow goes to outside providers and no request fails; when training ends,
replicas come home in steps.

**Start:** `ray start` the cluster, then `tidegate up --policy policy.yaml` and `serve deploy serve_apps/images.yaml`.

**Train:** `ray job submit -- python jobs/train_dit.py --config jobs/configs/digits.yaml --data … --run-dir … --gpus 6`

**Look:** `tidegate status`, `tidegate why CLAIM|NODE|GPU`. **See it all once on this machine:** `tidegate demo`.
""",
)

Address = Annotated[
    str, typer.Option("--address", envvar="RAY_ADDRESS", help="The Ray cluster, host:port; `auto` finds one here.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object for a script.")]

P = ParamSpec("P")
T = TypeVar("T")


def _says_errors(command: Callable[P, T]) -> Callable[P, T]:
    """An error of ours is a sentence on stderr and exit code 1, not a traceback."""

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return command(*args, **kwargs)
        except TidegateError as error:
            Console(stderr=True, highlight=False, soft_wrap=True, markup=False).print(f"error: {error}")
            raise typer.Exit(1) from None

    return run


@app.command()
@_says_errors
def up(
    policy: Annotated[Path, typer.Option("--policy", help="The operator's settings.")] = Path("policy.yaml"),
    address: Address = "auto",
) -> None:
    """Start the arbiter and the health agents on a running Ray cluster. Run it again at any time: it only adds."""
    from tidegate.cli.up import bring_up

    for line in bring_up(policy, address):
        typer.echo(line)


@app.command()
@_says_errors
def status(address: Address = "auto", as_json: Json = False) -> None:
    """Who holds which GPU, what waits and why, where requests go."""
    from tidegate.cli.connect import ask
    from tidegate.cli.status import show_status

    found = ask(address, lambda arbiter: arbiter.status())
    if as_json:
        json.dump(found, sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        show_status(found, Console())


@app.command()
@_says_errors
def why(
    subject: Annotated[str, typer.Argument(help="A claim, node, GPU, pool, or the first six characters of its id.")],
    address: Address = "auto",
    as_json: Json = False,
) -> None:
    """What was decided about a claim, node, GPU or pool, and why: the journal's lines on it."""
    from tidegate.cli.connect import ask
    from tidegate.cli.why import journal_rows, show_journal

    entries = ask(address, lambda arbiter: arbiter.why(subject))
    if as_json:
        json.dump(journal_rows(entries), sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        show_journal(subject, entries, Console())
    if not entries:
        raise typer.Exit(1)


@app.command()
@_says_errors
def claim(
    gpus: Annotated[int, typer.Option(help="GPUs at most.")],
    min_gpus: Annotated[int | None, typer.Option(help="GPUs at least; all of them if not given.")] = None,
    claim_class: Annotated[str, typer.Option("--class", help="A class of policy.yaml.")] = "pretrain",
    order: Annotated[int, typer.Option(help="Inside a class the higher goes first.")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Needed: claims are filed by jobs.")] = False,
    address: Address = "auto",
    as_json: Json = False,
) -> None:
    """What would become of a claim if it were filed now, and why. Nothing is filed."""
    from dataclasses import asdict

    from tidegate.arbiter.messages import ClaimSpec
    from tidegate.cli.connect import ask

    if not dry_run:
        raise typer.BadParameter(
            "claims are filed by jobs (`ray job submit -- python jobs/train_dit.py`); add --dry-run"
        )
    spec = ClaimSpec(
        name="a claim",
        claim_class=claim_class,
        order=order,
        max_gpus=gpus,
        min_gpus=gpus if min_gpus is None else min_gpus,
        owner="tidegate claim",
    )
    found = ask(address, lambda arbiter: arbiter.forecast(spec))
    if as_json:
        json.dump(asdict(found), sys.stdout, indent=2)
        sys.stdout.write("\n")
        return
    typer.echo(found.reason)
    if found.nodes:
        nodes = ", ".join(node[:12] for node in found.nodes)
        typer.echo(f"{found.gpus} GPUs on {nodes}; {found.replicas_leaving} replicas would leave")


@app.command()
@_says_errors
def release(
    claim_id: Annotated[str, typer.Argument(metavar="CLAIM", help="As `tidegate status` shows it.")],
    reason: Annotated[str, typer.Option(help="Stands in the journal.")] = "released by a person",
    address: Address = "auto",
) -> None:
    """Take a claim back: undone if it does not run yet, else its GPUs go back to serving."""
    from tidegate.cli.connect import ask
    from tidegate.ids import ClaimId

    ask(address, lambda arbiter: arbiter.release(ClaimId(claim_id), reason))
    typer.echo(f"{claim_id} is released")


@app.command()
@_says_errors
def quarantine(
    subject: Annotated[str, typer.Argument(help="A GPU or a node: its name, its id, or six characters of it or more.")],
    reason: Annotated[str, typer.Option(help="Stands in the journal.")],
    tier: Annotated[Tier, typer.Option(help="What it is still good for.")] = Tier.SERVE,
    address: Address = "auto",
) -> None:
    """Keep a GPU or a node from gangs until it is pardoned; a rank on it leaves at once."""
    from tidegate.cli.connect import ask

    if tier is Tier.GANG:
        raise typer.BadParameter("a quarantined GPU is good for `serve` or for `none`")
    verdict = ask(address, lambda arbiter: arbiter.quarantine(subject, tier, reason))
    typer.echo(f"{verdict.gpu or verdict.node} is kept from gangs, good for: {verdict.tier}; it ends by {verdict.ends}")


@app.command()
@_says_errors
def pardon(
    subject: Annotated[str, typer.Argument(help="A GPU or a node: its name, its id, or six characters of it or more.")],
    reason: Annotated[str, typer.Option(help="Stands in the journal.")] = "pardoned by a person",
    address: Address = "auto",
) -> None:
    """End every quarantine on a GPU or a node. A fault that is still there is found again at the next look."""
    from tidegate.cli.connect import ask

    ask(address, lambda arbiter: arbiter.pardon(subject, reason))
    typer.echo(f"{subject} is pardoned")


@app.command()
@_says_errors
def publish(
    folder: Annotated[Path, typer.Argument(help="An export: a run's `export/`, or made by jobs/export_pipeline.py.")],
    app_name: Annotated[str, typer.Option("--app", help="The Serve application.")] = "images",
    address: Address = "auto",
) -> None:
    """Have the replicas serve new weights. Each replica verifies them first; refused ones leave the old serving."""
    from tidegate.cli.connect import ask
    from tidegate.train.export import export_id

    export_id(folder)
    weights = ask(address, lambda arbiter: arbiter.publish(app_name, str(folder.resolve())))
    typer.echo(f"version {weights.version} is published: {weights.uri}")


@app.command()
@_says_errors
def demo(
    output: Annotated[Path, typer.Option(help="Report and pictures go here.")] = Path("demo-output"),
    base_port: Annotated[int, typer.Option(help="Ports from here on: GCS, dashboard, HTTP, provider.")] = 6390,
    steps: Annotated[int | None, typer.Option(help="Training steps, in place of the config's.")] = None,
) -> None:
    """The whole job once, on this machine, without a GPU: serve, train, crash, heat, return. About six minutes."""
    from tidegate.cli.demo.play import play

    raise typer.Exit(play(output, base_port=base_port, steps=steps))


if __name__ == "__main__":
    app()
