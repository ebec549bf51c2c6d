"""Who keeps whose copies."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tidegate.gang.buddies import buddies
from tidegate.ids import NodeId


def test_alone_there_is_nobody() -> None:
    assert buddies({}) == buddies({NodeId("a"): "rack-1"}) == {}


def test_across_racks() -> None:
    nodes = {NodeId(name): f"rack-{name[0]}" for name in ("1a", "1b", "2a", "2b")}
    chosen = buddies(nodes)
    assert all(node[0] != buddy[0] for node, buddy in chosen.items())


@given(st.lists(st.sampled_from(["a", "b", "c", "d", None]), min_size=2, max_size=30))
def test_each_keeps_for_one_and_in_another_domain_where_there_is_a_way(domains: list[str | None]) -> None:
    nodes = {NodeId(f"node-{number:02d}"): domain for number, domain in enumerate(domains)}
    chosen = buddies(nodes)
    assert set(chosen) == set(chosen.values()) == set(nodes)
    assert all(node != buddy for node, buddy in chosen.items())
    most = max(Counter(domain for domain in domains if domain).values(), default=1)
    if 2 * most <= len(domains):
        assert all(nodes[node] is None or nodes[node] != nodes[buddy] for node, buddy in chosen.items())
