"""Which node keeps a second copy of whose memory. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from tidegate.ids import NodeId


def buddies(domains: Mapping[NodeId, str | None]) -> dict[NodeId, NodeId]:
    """For each node another one that keeps its copies: each is chosen once, and lies in another failure domain than its
    node wherever no domain has more than half of all nodes. A node that has no domain is one of its own.

    Nodes stand in a row, domain by domain, and each takes the one so many places on as the largest domain has nodes.
    """
    if len(domains) < 2:
        return {}
    sizes = Counter(domain for domain in domains.values() if domain is not None)
    row = sorted(domains, key=lambda node: (domains[node] is None, domains[node] or "", node))
    step = max(sizes.values(), default=1)
    if step >= len(row):
        step = 1
    return {node: row[(place + step) % len(row)] for place, node in enumerate(row)}
