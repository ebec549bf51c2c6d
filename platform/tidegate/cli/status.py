"""`tidegate status` as a person reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

# Colour never carries meaning alone: each cell has a word too.
STYLE: Mapping[str, str] = {
    "serving": "cyan",
    "serving_idle": "cyan",
    "starting": "yellow",
    "draining": "yellow",
    "productive": "green",
    "recomputed": "green",
    "forming": "yellow",
    "restarting": "red",
    "finishing": "green",
    "quarantined": "red",
    "free": "dim",
    "unknown": "red",
}

SHORT: Mapping[str, str] = {
    "serving_idle": "serves",
    "serving": "serves",
    "productive": "trains",
    "recomputed": "redoes",
}


def show_status(found: Mapping[str, Any], console: Console) -> None:
    console.print(status_view(found))


def status_view(found: Mapping[str, Any]) -> Group:
    parts: list[Table | Text] = [gpu_map(found)]
    if found["quarantines"]:
        parts.append(findings("quarantines", found["quarantines"]))
    if found["held_back"]:
        rules = ", ".join(dict.fromkeys(finding["rule"] for finding in found["held_back"]))
        parts.append(findings(f"FLEET BRAKE on rule {rules}: not carried out", found["held_back"]))
    parts += [claims(found), traffic(found), money(found["purse"])]
    parts.append(Text(f"arbiter: {found['reason']}", style="dim"))
    return Group(*parts)


def gpu_map(found: Mapping[str, Any]) -> Table:
    """Nodes × GPUs: who has each one, and how warm it is."""
    table = Table(title="GPUs", title_justify="left", box=None, pad_edge=False)
    table.add_column("node")
    widest = max((len(node["gpus"]) for node in found["nodes"]), default=0)
    for index in range(widest):
        table.add_column(f"GPU {index}")
    for node in found["nodes"]:
        cells = [_cell(gpu) for gpu in node["gpus"]]
        note = f"  {node['source_error']}" if node["source_error"] else ""
        table.add_row(f"{node['name']} {node['node'][:8]}{note}", *cells)
    return table


def claims(found: Mapping[str, Any]) -> Table:
    table = Table(title="claims", title_justify="left", box=None, pad_edge=False)
    for column in ("claim", "class", "state", "step", "ranks", "why"):
        table.add_column(column)
    gangs = {gang["claim"]: gang for gang in found["gangs"]}
    for claim in found["claims"]:
        gang = gangs.get(claim["claim"])
        step, ranks = (str(gang["step"]), str(gang["world_size"])) if gang else ("", "")
        table.add_row(claim["claim"], claim["class"], claim["state"], step, ranks, claim["reason"])
    return table


def findings(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in ("GPU or node", "rule", "good for", "since", "why", "ends"):
        table.add_column(column, overflow="fold")
    for row in rows:
        since = datetime.fromtimestamp(row["since_s"]).astimezone().strftime("%H:%M:%S")
        table.add_row(row["gpu"] or row["node"], row["rule"], row["tier"], since, row["evidence"], row["ends"])
    return table


def money(purse: Mapping[str, Any]) -> Text:
    """What overflow has cost, and what it may."""
    parts = []
    for period in ("hour", "day"):
        budget = purse[f"per_{period}_usd"]
        of = "" if budget is None else f" of ${budget:.2f}"
        parts.append(f"${purse[f'spent_{period}_usd']:.2f}{of} this {period}")
    said = f"spent on overflow: {', '.join(parts)}"
    if purse["over_budget"] is None:
        return Text(said)
    then = {"wait": "claims on serving's GPUs wait", "shed": "overflow is refused"}[purse["then"]]
    return Text(f"{said}; {purse['over_budget']}: {then}", style="red")


def traffic(found: Mapping[str, Any]) -> Table:
    table = Table(title=f"requests (spillway {found['spillway']})", title_justify="left", box=None, pad_edge=False)
    for column in ("gateway", "waiting", "local", "spilled", "refused", "failed", "providers"):
        table.add_column(column)
    for gateway in found["gateways"]:
        providers = ", ".join(f"{p['name']} {p['state']} {p['ongoing']}/{p['slots']}" for p in gateway["providers"])
        counts = ("waiting", "answered_local_total", "answered_spilled_total", "refused_total", "failed_total")
        table.add_row(gateway["gateway"], *(str(gateway[name]) for name in counts), providers)
    return table


def _cell(gpu: Mapping[str, Any]) -> Text:
    celsius = gpu["temperature_celsius"]
    heat = f"{celsius:.0f}°C" if celsius is not None else "?°C"
    owner = gpu["owner"]
    tier = "" if gpu["tier"] == "gang" else f" ({gpu['tier']} tier)"
    return Text(f"{words_of(owner)} {heat}{tier}", style=STYLE.get(owner, ""))


def words_of(owner: str) -> str:
    return SHORT.get(owner, owner)
