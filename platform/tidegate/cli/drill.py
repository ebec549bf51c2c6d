"""`tidegate drill`: a made-up fault on a real node, to see that what should follows."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tidegate.cli.health import ANSWER_DEADLINE_S, UnknownNodeError, choose, name_of
from tidegate.cli.options import Address, says_errors
from tidegate.health.drills import Drill
from tidegate.ids import NodeId

drill_commands = typer.Typer()


@drill_commands.command()
@says_errors
def drill(
    fault: Annotated[Drill, typer.Argument(help="What the node is to believe.")],
    node: Annotated[str, typer.Option("--node", help="A node's name, id, or the beginning of either.")],
    subject: Annotated[str, typer.Option(help="The GPU or port; the node's first one if not given.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would follow.")] = False,
    address: Address = "auto",
) -> None:
    """Let a node's health agent take a made-up fault for true: the verdict, and all that follows from it, is real.

    It ends as the verdict says, or by `tidegate pardon` of its subject.
    """
    import ray

    from tidegate.arbiter.client import NAMESPACE
    from tidegate.cli.connect import connect
    from tidegate.ids import health_agent_name

    connect(address)
    try:
        names = {NodeId(n["NodeID"]): name_of(n) for n in ray.nodes() if n["Alive"]}
        [chosen] = choose(names, node)
        try:
            agent: Any = ray.get_actor(health_agent_name(chosen), namespace=NAMESPACE)
        except ValueError:
            raise UnknownNodeError(f"{names[chosen]} has no health agent\nhint: run `tidegate up`") from None
        if fault is Drill.HANG:
            typer.echo(ray.get(agent.hang.remote(subject or None, dry_run), timeout=ANSWER_DEADLINE_S))
            return
        verdicts = ray.get(agent.drill.remote(fault, subject or None, dry_run), timeout=ANSWER_DEADLINE_S)
    finally:
        ray.shutdown()
    for verdict in verdicts:
        would = "would be" if dry_run else "is"
        typer.echo(f"{verdict.gpu or verdict.node}: {verdict.rule} {would} {verdict.action}, {verdict.when}")
        typer.echo(f"  because {verdict.evidence}\n  ends: {verdict.ends}")
    if not verdicts:
        typer.echo("nothing new: what would follow stands already, or policy.yaml has switched the rule off")
