"""GPUs that neither a replica nor a claim of ours holds, and that are in use all the same.

Ray's own elastic scaling counts them as if they were free, and waits for ever for a group that can't form.
"""

from __future__ import annotations

from collections.abc import Collection

from tidegate.arbiter.book import Book
from tidegate.arbiter.messages import ClaimSpec
from tidegate.arbiter.placement import place
from tidegate.arbiter.view import NodeSeen, PoolSeen, View
from tidegate.ids import NodeId, PoolName, pool_name

A, B = NodeId("a" * 56), NodeId("b" * 56)
WANT = ClaimSpec(name="run", claim_class="pretrain", max_gpus=4, min_gpus=2, owner="test")


def view(free: float, running: int = 0, stopping: int = 0) -> View:
    """Node A is all free; of B's two GPUs `free` are."""
    pools: dict[PoolName, PoolSeen] = {}
    if running or stopping:
        name = pool_name(B)
        pools[name] = PoolSeen(name=name, target=running, running=running, starting=0, stopping=stopping)
    nodes = {
        A: NodeSeen(id=A, address="", gpu_slots=2, free_gpu_slots=2),
        B: NodeSeen(id=B, address="", gpu_slots=2, free_gpu_slots=free),
    }
    return View(nodes=nodes, pools=pools, groups={}, gateways={}, health={}, gangs={})


def chosen(seen: View) -> Collection[NodeId]:
    placement = place(seen, Book(), WANT, may_move_serving=True)
    assert placement is not None
    return set(placement.nodes)


def test_a_node_on_which_a_stranger_has_a_gpu_is_not_placed_on() -> None:
    assert chosen(view(free=2)) == {A, B}
    assert chosen(view(free=1)) == {A}
    assert chosen(view(free=1.5)) == {A}, "half a GPU is enough to be in the way"


def test_our_own_replicas_are_no_strangers() -> None:
    assert chosen(view(free=1, running=1)) == {A, B}
    assert chosen(view(free=0, running=1, stopping=1)) == {A, B}
    assert chosen(view(free=0, running=1)) == {A}
