"""`tidegate status` as a person reads it."""

from __future__ import annotations

from collections.abc import Mapping
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
}

SHORT: Mapping[str, str] = {
    "serving_idle": "serves",
    "serving": "serves",
    "productive": "trains",
    "recomputed": "redoes",
}


def show_status(found: Mapping[str, Any], console: Console) -> None:
    parts = [gpu_map(found), claims(found), traffic(found)]
    if found["quarantines"]:
        parts.insert(1, quarantines(found))
    console.print(Group(*parts))
    console.print(Text(f"arbiter: {found['reason']}", style="dim"))


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


def quarantines(found: Mapping[str, Any]) -> Table:
    table = Table(title="quarantines", title_justify="left", box=None, pad_edge=False)
    for column in ("GPU or node", "rule", "good for", "why", "ends"):
        table.add_column(column)
    for held in found["quarantines"]:
        table.add_row(held["gpu"] or held["node"], held["rule"], held["tier"], held["evidence"], held["ends"])
    return table


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
    owner = str(gpu["owner"])
    tier = "" if gpu["tier"] == "gang" else f" ({gpu['tier']} tier)"
    return Text(f"{SHORT.get(owner, owner)} {heat}{tier}", style=STYLE.get(owner, ""))
