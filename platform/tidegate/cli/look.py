"""The commands that only look: `claims`, `nodes`, `providers`, `watch`, `report`, `audit`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tidegate.cli.options import Address, Json, print_json, says_errors
from tidegate.clock import SystemClock

look = typer.Typer()


@look.command()
@says_errors
def claims(
    address: Address = "auto",
    ended: Annotated[bool, typer.Option("--ended", help="Those that are done or undone too.")] = False,
    as_json: Json = False,
) -> None:
    """All claims: what each one waits for or holds, since when, why, and what its overflow costs."""
    from tidegate.cli.connect import ask
    from tidegate.cli.tables import claim_table, claims_to_show

    found = ask(address, lambda arbiter: arbiter.status())
    if as_json:
        print_json(claims_to_show(found, ended))
    else:
        Console().print(claim_table(found, ended))


@look.command()
@says_errors
def nodes(address: Address = "auto", as_json: Json = False) -> None:
    """Real nodes with their GPUs (tenant, temperature, tier, what is against them), and providers as virtual nodes."""
    from tidegate.cli.connect import ask
    from tidegate.cli.tables import node_rows, node_table, virtual_table
    from tidegate.telemetry.fleet import virtual_nodes

    found = ask(address, lambda arbiter: arbiter.status())
    if as_json:
        print_json({"nodes": node_rows(found), "virtual_nodes": virtual_nodes(found)})
    else:
        console = Console()
        console.print(node_table(found))
        console.print(virtual_table(found))


@look.command()
@says_errors
def providers(address: Address = "auto", as_json: Json = False) -> None:
    """Where overflow may go, as virtual nodes: slots, price, latency, spend, and each one's state and why."""
    from tidegate.cli.connect import ask
    from tidegate.cli.tables import virtual_table
    from tidegate.telemetry.fleet import virtual_nodes

    found = ask(address, lambda arbiter: arbiter.status())
    if as_json:
        print_json(virtual_nodes(found))
    else:
        Console().print(virtual_table(found))


@look.command()
@says_errors
def watch(
    address: Address = "auto",
    every_s: Annotated[float, typer.Option("--every", min=0.2, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and end.")] = False,
) -> None:
    """`tidegate status`, drawn anew every second until Ctrl-C. It goes on while the arbiter restarts."""
    from tidegate.cli.watch import watch_cluster

    watch_cluster(address, Console(), every_s=every_s, once=once)


@look.command()
@says_errors
def report(
    run: Annotated[str, typer.Argument(help="A run or a claim; without it the whole cluster.")] = "",
    state_dir: Annotated[
        Path | None, typer.Option(help="The arbiter's `arbiter.state_dir`; asked of the arbiter if not given.")
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="With RUN: its run directory, for checkpoint stalls and restarts.")
    ] = None,
    hours: Annotated[float | None, typer.Option(min=0.001, help="Only the last so many hours.")] = None,
    address: Address = "auto",
    as_json: Json = False,
) -> None:
    """What became of every GPU-second (the owners' shares add to 100 %), of the requests, and of the money for spill.

    It reads the arbiter's files: run it on the head node, or give --state-dir a copy of them.
    """
    from tidegate.cli.connect import ask
    from tidegate.cli.report import read_report
    from tidegate.cli.tables import report_tables

    if run_dir is not None and not run:
        raise typer.BadParameter("--run-dir belongs to one run: name it")
    if state_dir is None:
        state_dir = Path(ask(address, lambda arbiter: arbiter.status())["state_dir"])
    found = read_report(state_dir, run or None, run_dir=run_dir, last_s=None if hours is None else hours * 3600)
    if as_json:
        print_json(found)
    else:
        console = Console()
        for table in report_tables(found):
            console.print(table)


@look.command()
@says_errors
def audit(
    since: Annotated[str, typer.Option(help="Requests accepted since: `90m`, `2h`, `7d` ago, or an ISO time.")] = "1d",
    state_dir: Annotated[
        Path | None, typer.Option(help="The arbiter's `arbiter.state_dir`; asked of the arbiter if not given.")
    ] = None,
    grace_s: Annotated[float, typer.Option(min=0, help="A request may be under way for so long.")] = 120.0,
    address: Address = "auto",
    as_json: Json = False,
) -> None:
    """Prove from the ledgers that every request ended once (accepted = answered + refused + cancelled) and that none
    was paid for twice. What breaks it is listed, and the exit code is 1.

    It reads the gateways' files: run it where they lie, or give --state-dir a copy of them.
    """
    from tidegate.cli.audit import as_dict, audit_tables, read_audit, since_of
    from tidegate.cli.connect import ask

    now_s = SystemClock().now_s()
    since_s = since_of(since, now_s)
    if state_dir is None:
        state_dir = Path(ask(address, lambda arbiter: arbiter.status())["state_dir"])
    found = read_audit(state_dir, since_s, now_s, grace_s)
    if as_json:
        print_json(as_dict(found))
    else:
        console = Console()
        for part in audit_tables(found):
            console.print(part)
    if not found.proven:
        raise typer.Exit(1)
