"""Real and virtual nodes in one list: providers are nodes too, as the arbiter sees them. Pure, on `tidegate status`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def virtual_nodes(status: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row a provider, over all gateways: slots, what is in them, price, latency, state, spent.

    `suspect` where any gateway says so; latency is the mean over gateways that have measured one.
    """
    rows: dict[str, dict[str, Any]] = {}
    latencies: dict[str, list[float]] = {}
    for gateway in status["gateways"]:
        for seen in gateway["providers"]:
            row = rows.setdefault(
                seen["name"],
                {
                    "provider": seen["name"],
                    "state": seen["state"],
                    "slots": 0,
                    "ongoing": 0,
                    "price_per_image_usd": seen["price_per_image_usd"],
                    "spent_usd": 0.0,
                    "why": seen["why"],
                },
            )
            row["slots"] += seen["slots"]
            row["ongoing"] += seen["ongoing"]
            row["spent_usd"] += seen["spent_usd"]
            if seen["state"] == "suspect" or row["state"] != "suspect":
                row["state"], row["why"] = seen["state"], seen["why"]
            if seen["latency_s"] is not None:
                latencies.setdefault(seen["name"], []).append(seen["latency_s"])
    for name, row in rows.items():
        known = latencies.get(name)
        row["latency_s"] = sum(known) / len(known) if known else None
    return [rows[name] for name in sorted(rows)]


def tenant(node: Mapping[str, Any], gpu: Mapping[str, Any]) -> str:
    """Who has a GPU: a run by its claim, `serving`, or nobody."""
    if node["held_by"] is not None:
        return str(node["held_by"])
    if gpu["owner"] in ("serving", "serving_idle", "starting", "draining"):
        return "serving"
    return "-"


def against(node: Mapping[str, Any], gpu: Mapping[str, Any], status: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The quarantines, and the findings that the fleet brake holds back, on a GPU or its whole node."""
    return [
        {**finding, "held_back": kind == "held_back"}
        for kind in ("quarantines", "held_back")
        for finding in status[kind]
        if finding["node"] == node["node"] and finding["gpu"] in (gpu["gpu"], None)
    ]
