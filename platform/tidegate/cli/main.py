"""The `tidegate` command."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tidegate.cli.checkpoints import checkpoint
from tidegate.cli.data import data
from tidegate.cli.drill import drill_commands
from tidegate.cli.health import health_commands
from tidegate.cli.look import look
from tidegate.cli.options import Address, Json, says_errors
from tidegate.errors import ModelRefusedError
from tidegate.ids import Tier

app = typer.Typer(
    name="tidegate",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    add_completion=False,
    help="""One Ray cluster that trains a diffusion transformer and serves it.

A training claim takes serving's GPUs; the overflow goes to outside providers and no request fails; when training ends,
replicas come home in steps.

**Start:** `tidegate up --head --app serve_apps/images.yaml`, and on each GPU machine `tidegate up --join HEAD:6379`;
on a Ray cluster that runs already, `tidegate up --app serve_apps/images.yaml`.

**Train:** `ray job submit -- python jobs/train_dit.py --config jobs/configs/digits.yaml --data … --run-dir … --gpus 6`

**Look:** `tidegate status`, `tidegate why CLAIM|NODE|GPU`, `tidegate health NODE`; `tidegate doctor` checks a machine.

**See it all once on this machine:** `tidegate demo`.
""",
)

app.add_typer(look)
app.add_typer(health_commands)
app.add_typer(drill_commands)
app.add_typer(data, name="data")
app.add_typer(checkpoint)

PolicyFile = Annotated[Path, typer.Option("--policy", help="The operator's settings.")]


@app.command()
@says_errors
def up(
    policy: PolicyFile = Path("policy.yaml"),
    address: Address = "auto",
    head: Annotated[bool, typer.Option("--head", help="Start the cluster's head on this machine first.")] = False,
    join: Annotated[str, typer.Option(metavar="HOST:PORT", help="Only join the cluster of this head, as a node.")] = "",
    label: Annotated[list[str], typer.Option(metavar="KEY=VALUE", help="With --join: a label of this node.")] = [],  # noqa: B006
    gpus: Annotated[
        int | None, typer.Option(min=0, help="With --join: GPUs to offer; Ray counts if not given.")
    ] = None,
    app_files: Annotated[list[Path], typer.Option("--app", help="Deploy this Serve file and wait until it runs.")] = [],  # noqa: B006
    redeploy: Annotated[bool, typer.Option("--redeploy", help="With --app: start its gateways anew.")] = False,
    apply: Annotated[bool, typer.Option("--apply", help="Start the control plane anew with changed settings.")] = False,
) -> None:
    """Start what does not run yet: Ray here (--head, --join), arbiter and health agents, Serve applications (--app).

    Without --head and --join it works on the running Ray cluster at --address. Run it again at any time: it only adds.
    """
    from tidegate.cli.up import bring_up, join_here, own_head, start_head_here

    if head and join:
        raise typer.BadParameter("a machine is started as the head or joins one: give --head or --join")
    if not join and (label or gpus is not None):
        raise typer.BadParameter("--label and --gpus are a joining node's: give --join HOST:PORT too")
    if join and (app_files or apply):
        raise typer.BadParameter("--app and --apply are for the cluster, not for a node that joins")
    if join:
        for line in join_here(policy, join, label, gpus):
            typer.echo(line)
        return
    if head:
        for line in start_head_here(policy):
            typer.echo(line)
        address = own_head(policy)
    for line in bring_up(policy, address, apps=app_files, apply=apply, redeploy=redeploy):
        typer.echo(line)


@app.command()
@says_errors
def down(
    policy: PolicyFile = Path("policy.yaml"),
    address: Address = "auto",
    apps: Annotated[
        bool, typer.Option("--apps", help="Leave Ray running: take our actors and app off --address.")
    ] = False,
) -> None:
    """Stop what `tidegate up` started on this machine; other people's Ray is never touched."""
    from tidegate.cli.up import stop_here, take_down

    for line in take_down(policy, address) if apps else stop_here(policy):
        typer.echo(line)


@app.command()
@says_errors
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
@says_errors
def why(
    subject: Annotated[
        str, typer.Argument(help="A claim, node, GPU, pool, replica or rule: its name, or six characters of it.")
    ],
    address: Address = "auto",
    as_json: Json = False,
) -> None:
    """What was decided about a claim, node, GPU, pool or replica, and why: the journal's lines on it."""
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
@says_errors
def claim(
    gpus: Annotated[int, typer.Option(help="GPUs at most.")],
    min_gpus: Annotated[int | None, typer.Option(help="GPUs at least; all of them if not given.")] = None,
    claim_class: Annotated[str, typer.Option("--class", help="A class of policy.yaml.")] = "pretrain",
    order: Annotated[int, typer.Option(help="Inside a class the higher goes first.")] = 0,
    gpus_per_node: Annotated[int | None, typer.Option(min=1, help="So many from each node.")] = None,
    one_domain: Annotated[bool, typer.Option("--one-domain", help="All nodes in one network domain.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Needed: claims are filed by jobs.")] = False,
    address: Address = "auto",
    as_json: Json = False,
) -> None:
    """What would become of a claim if it were filed now, and why. Nothing is filed."""
    from dataclasses import asdict

    from tidegate.arbiter.messages import ClaimSpec
    from tidegate.cli.connect import ask
    from tidegate.cli.tables import money_per_hour

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
        gpus_per_node=gpus_per_node,
        one_domain=one_domain,
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
    if found.claims_leaving:
        typer.echo(f"claims that would be asked to leave: {', '.join(found.claims_leaving)}")
    typer.echo(f"expected cost of overflow: {money_per_hour(found.spill_usd_per_hour)}")


@app.command()
@says_errors
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
@says_errors
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
@says_errors
def pardon(
    subject: Annotated[
        str, typer.Argument(help="A GPU or node, by name, id or six characters of it; or a braked rule.")
    ],
    reason: Annotated[str, typer.Option(help="Stands in the journal.")] = "pardoned by a person",
    address: Address = "auto",
) -> None:
    """End every quarantine on a GPU or a node. A fault that is still there is found again at the next look.

    Naming a rule on which the fleet brake is (`tidegate status` shows it) lets that rule go on.
    """
    from tidegate.cli.connect import ask

    ask(address, lambda arbiter: arbiter.pardon(subject, reason))
    typer.echo(f"{subject} is pardoned")


@app.command()
@says_errors
def publish(
    folder: Annotated[str, typer.Argument(help="An export: a run's `export/`, or made by jobs/export_pipeline.py.")],
    app_name: Annotated[str, typer.Option("--app", help="The Serve application.")] = "images",
    address: Address = "auto",
) -> None:
    """Have the replicas serve new weights, from a path that every node sees or `s3://bucket/prefix`.

    One replica verifies them and makes the pictures of `serving.rollout` with them; only then do the others follow.
    Refused ones leave the old ones serving: `tidegate why APP` says why.
    """
    from tidegate.checkpoint.address import is_address
    from tidegate.cli.connect import ask
    from tidegate.serve.fetching import read_file
    from tidegate.train.export_manifest import MANIFEST, export_id

    if not is_address(folder):
        folder = str(Path(folder).resolve())
        export_id(Path(folder))
    elif read_file(folder, MANIFEST) is None:
        raise ModelRefusedError(folder, f"{MANIFEST}: not there")
    weights = ask(address, lambda arbiter: arbiter.publish(app_name, folder))
    typer.echo(f"version {weights.version} is published: {weights.uri}")


@app.command()
@says_errors
def rollback(
    app_name: Annotated[str, typer.Option("--app", help="The Serve application.")] = "images",
    address: Address = "auto",
) -> None:
    """Take the newest weights back: the replicas serve what served before them."""
    from tidegate.cli.connect import ask

    weights = ask(address, lambda arbiter: arbiter.roll_back(app_name))
    typer.echo(f"back to version {weights.version}: {weights.uri or 'what the application was deployed with'}")


@app.command()
@says_errors
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
