"""`tidegate health` and `tidegate doctor` as a person reads them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tidegate.cli.options import Address, Json, print_json, says_errors
from tidegate.errors import TidegateError
from tidegate.health.agent import Seen
from tidegate.health.readings import Reading, Status
from tidegate.ids import NodeId

health_commands = typer.Typer()

ANSWER_DEADLINE_S = 10.0


class UnknownNodeError(TidegateError):
    """No node of the cluster, or more than one, is called so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one node's agent says; none where it does not answer."""

    node: NodeId
    name: str
    seen: Seen | None
    silent: str = ""


@health_commands.command()
@says_errors
def health(
    node: Annotated[str, typer.Argument(help="A node's name, id, or the beginning of either; all if not given.")] = "",
    address: Address = "auto",
    as_json: Json = False,
) -> None:
    """What each node's health agent sees: verdicts, findings, sources; of one node all readings with their age."""
    answers = asyncio.run(ask_agents(address, node))
    if as_json:
        print_json([as_rows(answer) for answer in answers])
        return
    console = Console()
    for part in node_view(answers[0]) if node else [summary(answers)]:
        console.print(part)
    if any(answer.seen is None for answer in answers):
        raise typer.Exit(1)


@health_commands.command()
@says_errors
def doctor(
    policy: Annotated[Path, typer.Option("--policy", help="The operator's settings.")] = Path("policy.yaml"),
    as_json: Json = False,
) -> None:
    """Check this machine: driver, NVML, profiling rights, InfiniBand, kernel log, limits, /dev/shm, clock, disk speed.

    Says what is wrong and how to fix it; exit code 1 if anything is. Needs no Ray.
    """
    from dataclasses import asdict

    from tidegate.health.doctor import Found, Limits, durable_write_speed, examine
    from tidegate.spec.load import load_policy
    from tidegate.spec.policy import Policy

    spec = (load_policy(policy) if policy.exists() else Policy()).health
    checks = list(examine(spec, Limits.here(), durable_write_speed))
    if as_json:
        print_json([asdict(check) for check in checks])
    else:
        table = _table("", "", "what", "found", "fix")
        styles = {Found.GOOD: "green", Found.NOTE: "yellow", Found.WRONG: "red"}
        for check in checks:
            table.add_row(Text(check.found, style=styles[check.found]), check.name, check.text, check.fix)
        Console().print(table)
    if any(check.found is Found.WRONG for check in checks):
        raise typer.Exit(1)


async def ask_agents(address: str, wanted: str) -> list[Answer]:
    """One answer for each node that has GPUs, or of the one that is `wanted`.

    Raises:
        UnknownNodeError: no node with GPUs is called so, or several are.
    """
    import ray

    from tidegate.cli.connect import connect

    connect(address)
    try:
        from tidegate.health.on_ray import gpu_nodes

        here = gpu_nodes()
        names = {NodeId(n["NodeID"]): name_of(n) for n in ray.nodes() if n["NodeID"] in here}
        chosen = choose(names, wanted)
        return list(await asyncio.gather(*(_ask(node, names[node]) for node in chosen)))
    finally:
        ray.shutdown()


def name_of(row: Mapping[str, Any]) -> str:
    """A node's name as `tidegate status` has it: its label, else its host's."""
    return str(row["Labels"].get("tidegate/name", row["NodeManagerHostname"]))


def choose(names: dict[NodeId, str], wanted: str) -> list[NodeId]:
    """Nodes by the beginning of their id or name; all of them for an empty one."""
    matching = [node for node, name in sorted(names.items()) if node.startswith(wanted) or name.startswith(wanted)]
    if wanted and len(matching) != 1:
        what = "no node" if not matching else f"{len(matching)} nodes"
        known = ", ".join(f"{name} ({node[:8]})" for node, name in sorted(names.items())) or "none with GPUs"
        raise UnknownNodeError(f"{wanted!r} names {what}\nhint: nodes are {known}")
    return matching


async def _ask(node: NodeId, name: str) -> Answer:
    import ray

    from tidegate.arbiter.client import NAMESPACE
    from tidegate.ids import health_agent_name

    try:
        agent: Any = ray.get_actor(health_agent_name(node), namespace=NAMESPACE)
        seen = await asyncio.wait_for(agent.seen.remote(), ANSWER_DEADLINE_S)
    except ValueError:
        return Answer(node=node, name=name, seen=None, silent="has no agent: run `tidegate up`")
    except (TimeoutError, ray.exceptions.RayError) as error:
        return Answer(node=node, name=name, seen=None, silent=f"its agent does not answer: {type(error).__name__}")
    return Answer(node=node, name=name, seen=seen)


def as_rows(answer: Answer) -> dict[str, Any]:
    """One node, for a script."""
    row: dict[str, Any] = {"node": answer.node, "name": answer.name, "silent": answer.silent or None}
    if answer.seen is None:
        return row
    seen = answer.seen
    return {
        **row,
        "sources": dict(seen.sources),
        "verdicts": [
            {
                "subject": verdict.gpu or verdict.node,
                "rule": verdict.rule,
                "action": str(verdict.action),
                "when": str(verdict.when),
                "since_s": verdict.at_s,
                "evidence": verdict.evidence,
                "ends": verdict.ends,
            }
            for verdict in seen.verdicts
        ],
        "findings": [
            {"at_s": finding.at_s, "subject": finding.subject, "what": finding.what, "text": finding.text}
            for finding in seen.findings
        ],
        "readings": [
            {
                "subject": reading.subject,
                "signal": str(reading.signal),
                "value": reading.value,
                "status": str(reading.status),
                "cause": reading.cause,
                "detail": reading.detail,
                "age_s": round(max(0.0, seen.at_s - reading.at_s), 3),
            }
            for reading in _sorted(seen.readings)
        ],
    }


def summary(answers: Sequence[Answer]) -> Table:
    table = _table("health", "node", "readings", "without a value", "verdicts", "sources in trouble")
    for answer in answers:
        name = f"{answer.name} {answer.node[:8]}"
        seen = answer.seen
        if seen is None:
            table.add_row(name, "", "", "", Text(answer.silent, style="red"))
            continue
        missing = sum(r.status not in (Status.OK, Status.UNSUPPORTED) for r in seen.readings)
        verdicts = "; ".join(f"{verdict.rule} on {(verdict.gpu or 'the node')[:16]}" for verdict in seen.verdicts)
        trouble = "; ".join(error for error in seen.sources.values() if error)
        count = sum(reading.status is Status.OK for reading in seen.readings)
        table.add_row(
            name, str(count), str(missing), Text(verdicts or "none", style="red" if verdicts else ""), trouble
        )
    return table


def node_view(answer: Answer) -> Iterator[Table | Text]:
    seen = answer.seen
    if seen is None:
        yield Text(f"{answer.name} {answer.silent}", style="red")
        return
    sources = _table(f"{answer.name} {answer.node[:8]}", "source", "")
    for name, error in seen.sources.items():
        sources.add_row(name, Text(error or "answers", style="yellow" if error else ""))
    yield sources
    verdicts = _table("verdicts", "on", "rule", "action", "evidence", "ends")
    for verdict in seen.verdicts:
        action = f"{verdict.action}, {verdict.when}"
        verdicts.add_row(verdict.gpu or "the node", verdict.rule, action, verdict.evidence, verdict.ends)
    yield verdicts if seen.verdicts else Text("no verdict stands")
    if seen.findings:
        findings = _table("findings, the newest last", "ago", "on", "what", "")
        for finding in seen.findings:
            findings.add_row(age(seen.at_s - finding.at_s), finding.subject, finding.what, finding.text)
        yield findings
    readings = _table("readings", "on", "signal", "value", "age", "")
    for reading in _sorted(seen.readings):
        value = f"{reading.value:.6g}" if reading.value is not None else str(reading.status)
        why = "; ".join(part for part in (reading.cause, reading.detail) if part)
        style = "dim" if reading.status is Status.UNSUPPORTED else "yellow" if reading.value is None else ""
        ago = age(seen.at_s - reading.at_s)
        readings.add_row(reading.subject, reading.signal, value, ago, why, style=style)
    yield readings


def age(seconds: float) -> str:
    """How long ago, short; a clock that was set back makes nothing negative."""
    seconds = max(0.0, seconds)
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def _sorted(readings: Sequence[Reading]) -> list[Reading]:
    return sorted(readings, key=lambda reading: (reading.subject, reading.signal))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
