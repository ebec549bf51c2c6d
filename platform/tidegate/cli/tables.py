"""Tables for people: claims, nodes, providers, the report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from rich.table import Table
from rich.text import Text

from tidegate.arbiter.states import ENDED
from tidegate.cli.status import STYLE, words_of
from tidegate.telemetry.fleet import against, tenant, virtual_nodes


def claims_to_show(found: Mapping[str, Any], ended: bool) -> list[dict[str, Any]]:
    return [row for row in found["claims"] if ended or row["state"] not in ENDED]


def claim_table(found: Mapping[str, Any], ended: bool) -> Table:
    table = _table("claims", "claim", "class", "order", "state", "since", "GPUs", "overflow", "why")
    for row in claims_to_show(found, ended):
        asked = str(row["max_gpus"]) if row["min_gpus"] == row["max_gpus"] else f"{row['min_gpus']}-{row['max_gpus']}"
        table.add_row(
            row["claim"],
            row["class"],
            str(row["order"]),
            row["state"],
            clock(row["since_s"]),
            f"{len(row['gpus'])} of {asked}",
            money_per_hour(row["spill_usd_per_hour"]),
            row["reason"],
        )
    return table


def node_rows(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The nodes of `status`, each GPU with its tenant and what is against it."""
    return [
        {
            **node,
            "gpus": [
                {**gpu, "tenant": tenant(node, gpu), "against": against(node, gpu, found)} for gpu in node["gpus"]
            ],
        }
        for node in found["nodes"]
    ]


def node_table(found: Mapping[str, Any]) -> Table:
    table = _table("nodes", "node", "GPU", "tenant", "does", "°C", "good for", "against it")
    for node in node_rows(found):
        name = f"{node['name']} {node['node'][:8]}"
        for gpu in node["gpus"]:
            celsius = gpu["temperature_celsius"]
            owner = gpu["owner"]
            table.add_row(
                name,
                f"{gpu['index']} {gpu['gpu'][:16]}",
                gpu["tenant"],
                Text(words_of(owner), style=STYLE.get(owner, "")),
                f"{celsius:.0f}" if celsius is not None else "?",
                gpu["tier"],
                "; ".join(_said(finding) for finding in gpu["against"]),
            )
            name = ""
        if node["source_error"]:
            table.add_row(name, "", "", "", "", "", Text(node["source_error"], style="red"))
    return table


def virtual_table(found: Mapping[str, Any]) -> Table | Text:
    rows = virtual_nodes(found)
    if not rows:
        return Text("no virtual nodes: no gateway reports a provider")
    table = _table("virtual nodes", "provider", "state", "slots", "$ an image", "latency", "spent", "why")
    for row in rows:
        latency = f"{row['latency_s']:.2f} s" if row["latency_s"] is not None else "?"
        table.add_row(
            row["provider"],
            row["state"],
            f"{row['ongoing']} of {row['slots']}",
            f"{row['price_per_image_usd']:.4f}",
            latency,
            f"${row['spent_usd']:.2f}",
            row["why"],
        )
    return table


def report_tables(found: Mapping[str, Any]) -> Iterator[Table | Text]:
    what = "cluster" if found["cluster"] else f"run {found['run']}"
    yield Text(f"{what}, {clock(found['since_s'])} to {clock(found['until_s'])}: {found['gpu_hours']:.3f} GPU-hours")
    owners = _table("", "owner", "GPU-hours", "%")
    for owner, row in sorted(found["owners"].items(), key=lambda item: -item[1]["gpu_hours"]):
        owners.add_row(Text(owner, style=STYLE.get(owner, "")), f"{row['gpu_hours']:.3f}", f"{row['percent']:.1f}")
    yield owners
    if found.get("runs"):
        runs = _table("runs", "run", "GPU-hours", "won", "spill", "$ a GPU-hour won")
        for name, row in found["runs"].items():
            runs.add_row(name, f"{row['gpu_hours']:.3f}", *_spill(row["spill"]))
        yield runs
    if found.get("gang"):
        yield Text(", ".join(f"{count} {name.replace('_', ' ')}" for name, count in found["gang"].items()))
    if found.get("save_interval"):
        every = found["save_interval"]
        yield Text(
            f"saves to disk every {every['now_s']:.1f} s; {every['best_s']:.1f} s would lose least "
            f"(stall {every['save_s'] * 1000:.1f} ms, a fault every {every['between_faults_s']:.0f} s)"
        )
    requests = found["requests"]
    yield Text(f"requests: {', '.join(f'{count} {name}' for name, count in requests.items())}")
    won, usd, price = _spill(found["spill"])
    yield Text(f"spill cost {usd}; training won {won} GPU-hours; $ a GPU-hour won: {price}")


def clock(at_s: float) -> str:
    return datetime.fromtimestamp(at_s).astimezone().strftime("%m-%d %H:%M:%S")


def money_per_hour(usd: float | None) -> str:
    return "no provider works" if usd is None else f"${usd:.2f} an hour"


def _spill(spill: Mapping[str, Any]) -> tuple[str, str, str]:
    price = spill["usd_per_gpu_hour_won"]
    return f"{spill['gpu_hours_won']:.3f}", f"${spill['usd']:.2f}", "-" if price is None else f"{price:.2f}"


def _said(finding: Mapping[str, Any]) -> str:
    kept = "held back by the fleet brake: " if finding["held_back"] else ""
    what = "" if finding["gpu"] else "whole node, "
    since = clock(finding["since_s"])
    return f"{kept}{what}{finding['rule']}: {finding['evidence']}, since {since}; ends: {finding['ends']}"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
