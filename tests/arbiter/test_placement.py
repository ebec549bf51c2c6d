from __future__ import annotations

from tidegate.arbiter.book import Book
from tidegate.arbiter.messages import ClaimSpec
from tidegate.arbiter.placement import DOMAIN_LABEL, most_ever, place
from tidegate.arbiter.view import NodeSeen, PoolSeen, View
from tidegate.ids import NodeId, pool_name


def node(name: str, slots: int = 8, domain: str = "", replicas: int = 0) -> tuple[NodeSeen, PoolSeen]:
    seen = NodeSeen(
        id=NodeId(name * 14), address="10.0.0.1", gpu_slots=slots, free_gpu_slots=slots, labels={DOMAIN_LABEL: domain}
    )
    pool = PoolSeen(name=pool_name(seen.id), target=replicas, running=replicas, starting=0, stopping=0)
    return seen, pool


def view(*nodes: tuple[NodeSeen, PoolSeen]) -> View:
    return View(
        nodes={seen.id: seen for seen, _ in nodes},
        pools={pool.name: pool for _, pool in nodes},
        groups={},
        gateways={},
        health={},
        gangs={},
    )


def want(most: int, least: int | None = None) -> ClaimSpec:
    return ClaimSpec(name="r", claim_class="pretrain", max_gpus=most, min_gpus=least or most, owner="t")


def names(seen: View, spec: ClaimSpec, may_move_serving: bool = True) -> list[str] | None:
    found = place(seen, Book(), spec, may_move_serving)
    return [name[:4] for name in found.nodes] if found else None


def test_one_domain_before_fewer_replicas() -> None:
    seen = view(
        node("aaaa", domain="x", replicas=8), node("bbbb", domain="x", replicas=8), node("cccc", domain="y", replicas=0)
    )
    assert names(seen, want(16)) == ["aaaa", "bbbb"]


def test_the_smallest_domain_that_holds_the_gang() -> None:
    big = [node(name, domain="big") for name in ("aaaa", "bbbb", "cccc", "dddd")]
    small = [node(name, domain="small") for name in ("eeee", "ffff")]
    assert names(view(*big, *small), want(16)) == ["eeee", "ffff"]


def test_fewest_replicas_to_move_inside_a_domain() -> None:
    seen = view(node("aaaa", replicas=8), node("bbbb", replicas=2), node("cccc", replicas=5))
    assert names(seen, want(16)) == ["bbbb", "cccc"]


def test_nodes_of_one_size_only() -> None:
    """Every bundle of a Ray Train group has the same size."""
    seen = view(node("aaaa", slots=4), node("bbbb", slots=8), node("cccc", slots=8))
    assert names(seen, want(20, 9)) == ["bbbb", "cccc"]
    assert most_ever(seen) == 16
    assert names(seen, want(20)) is None


def test_no_replica_is_moved_for_a_weaker_class() -> None:
    seen = view(node("aaaa", replicas=1), node("bbbb", replicas=0))
    assert names(seen, want(8), may_move_serving=False) == ["bbbb"]
    assert names(seen, want(16), may_move_serving=False) is None
