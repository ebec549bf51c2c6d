"""What the arbiter knows, as plain values: `tidegate status`, `claims`, `nodes` and `watch` read nothing else. Pure."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from tidegate.arbiter import purse
from tidegate.arbiter.book import Book
from tidegate.arbiter.claim import Claim
from tidegate.arbiter.owners import owners
from tidegate.arbiter.view import NodeSeen, View, gpus_of, tier_of
from tidegate.spec.policy import Policy
from tidegate.telemetry.goodput import Owner


def status_of(book: Book, view: View, policy: Policy, reason: str, now_s: float) -> dict[str, Any]:
    """Everything, ready for JSON. `reason` is the newest decision's."""
    owned = owners(book, view)
    ordered = sorted(view.nodes.values(), key=lambda node: (node.name, node.id))
    return {
        "at_s": now_s,
        "nodes": [_node_row(book, view, node, owned) for node in ordered],
        "claims": [_claim_row(claim) for claim in book.claims.values()],
        "gangs": [asdict(gang) for gang in view.gangs.values()],
        "pools": [asdict(pool) for pool in view.pools.values()],
        "gateways": [asdict(gateway) for gateway in view.gateways.values()],
        "spillway": str(book.orders.spillway),
        "orders_generation": book.orders.generation,
        "purse": _purse_row(book, view, policy, now_s),
        "weights": {app: asdict(weights) for app, weights in book.weights.items()},
        "replicas": [asdict(replica) for replica in view.replicas.values()],
        "quarantines": [
            {"since_s": quarantine.since_s, **asdict(quarantine.verdict)} for quarantine in book.quarantines.values()
        ],
        "held_back": [
            {"since_s": finding.since_s, "reason": finding.reason, **asdict(finding.verdict)}
            for finding in book.held_back.values()
        ],
        "reason": reason,
        "state_dir": str(policy.arbiter.state_path),
    }


def _node_row(book: Book, view: View, node: NodeSeen, owned: dict[str, Owner]) -> dict[str, Any]:
    health = view.health.get(node.id)
    holder = book.holder_of(node.id)
    return {
        "node": node.id,
        "name": node.name,
        "address": node.address,
        "held_by": holder.id if holder is not None else None,
        "gpus": [
            {
                "gpu": gpu.uuid,
                "index": gpu.index,
                "temperature_celsius": gpu.temperature_celsius,
                "tensor_active_ratio": gpu.tensor_active_ratio,
                "owner": str(owned.get(gpu.uuid, Owner.FREE)),
                "tier": str(tier_of(book, node.id, gpu.uuid)),
            }
            for gpu in gpus_of(view, node)
        ],
        "source_error": health.source_error if health is not None else "no agent reports",
    }


def _claim_row(claim: Claim) -> dict[str, Any]:
    return {
        "claim": claim.id,
        "state": str(claim.state),
        "reason": claim.reason,
        "owner": claim.spec.owner,
        "class": claim.spec.claim_class,
        "order": claim.spec.order,
        "min_gpus": claim.spec.min_gpus,
        "max_gpus": claim.spec.max_gpus,
        "filed_at_s": claim.filed_at_s,
        "since_s": claim.since_s,
        "nodes": list(claim.nodes),
        "gpus": [gpu for node in claim.grant.nodes for gpu in node.gpus] if claim.grant else [],
        "spill_usd_per_hour": claim.spill_usd_per_hour,
    }


def _purse_row(book: Book, view: View, policy: Policy, now_s: float) -> dict[str, Any]:
    spent = purse.spent(book.purse, view.gateways, now_s)
    over = purse.over_budget(spent, policy.purse, now_s)
    return {
        "spent_hour_usd": spent.hour_usd,
        "spent_day_usd": spent.day_usd,
        "per_hour_usd": policy.purse.per_hour_usd,
        "per_day_usd": policy.purse.per_day_usd,
        "over_budget": over.reason if over is not None else None,
        "then": policy.purse.over_budget,
    }
