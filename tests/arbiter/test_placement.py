from __future__ import annotations

import math
import time
from dataclasses import replace

from tidegate.arbiter.book import Book, apply
from tidegate.arbiter.messages import Action, ClaimSpec, GangPhase, GangReport, GpuSeen, HealthReport, Verdict, When
from tidegate.arbiter.moves import Advance, Brake, File, Impose
from tidegate.arbiter.placement import most_ever, place, work_lost_s
from tidegate.arbiter.states import ClaimState
from tidegate.arbiter.view import DOMAIN_LABEL, NodeSeen, PoolSeen, View
from tidegate.ids import ClaimId, Generation, GpuId, NodeId, Tier, pool_name


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
        health={seen.id: report(seen) for seen, _ in nodes},
        gangs={},
    )


def report(node: NodeSeen) -> HealthReport:
    """An agent that names the GPUs `aaaaaaaaaaaa-0` and so on."""
    gpus = tuple(GpuSeen(uuid=GpuId(f"{node.id[:12]}-{index}"), index=index) for index in range(node.gpu_slots))
    return HealthReport(node=node.id, at_s=0.0, gpus=gpus)


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


def suspected(seen: View, name: str) -> Book:
    """A book with a finding on the node that the fleet brake holds back."""
    return apply(Book(), Brake(verdict=hot(name, "g"), reason="fleet brake", at_s=0.0))


def hot(name: str, gpu: str) -> Verdict:
    return Verdict(
        at_s=0.0,
        node=NodeId(name * 14),
        gpu=GpuId(gpu),
        rule="temperature",
        action=Action.EVICT_GPU,
        when=When.NOW,
        tier=Tier.SERVE,
        evidence="79 °C",
        ends="70 °C",
    )


def quarantined(*names: str) -> Book:
    book = Book()
    for name in names:
        book = apply(book, Impose(verdict=hot(name, f"{name * 3}-0"), at_s=0.0))
    return book


def chosen(seen: View, spec: ClaimSpec, book: Book | None = None) -> list[str] | None:
    found = place(seen, book or Book(), spec, may_move_serving=True)
    return [name[:4] for name in found.nodes] if found else None


def test_the_order_fitness_domain_replicas_name() -> None:
    """Each level decides only where all before it are equal."""
    seen = view(
        node("aaaa", domain="x", replicas=0),  # not quite well
        node("bbbb", domain="y", replicas=0),  # the domain is too small for the gang
        node("cccc", domain="x", replicas=5),
        node("dddd", domain="x", replicas=3),
        node("eeee", domain="x", replicas=3),
    )
    assert chosen(seen, want(16), quarantined("aaaa")) == ["dddd", "eeee"]
    assert chosen(seen, want(24), quarantined("aaaa")) == ["dddd", "eeee", "cccc"]
    assert chosen(seen, want(32), quarantined("aaaa")) == ["dddd", "eeee", "cccc", "bbbb"]
    assert chosen(seen, want(39), quarantined("aaaa")) == ["dddd", "eeee", "cccc", "bbbb", "aaaa"]


def test_a_node_with_a_finding_that_is_held_back_comes_after_its_equals() -> None:
    seen = view(node("aaaa", replicas=0), node("bbbb", replicas=8))
    assert chosen(seen, want(8), suspected(seen, "aaaa")) == ["bbbb"]
    assert chosen(seen, want(16), suspected(seen, "aaaa")) == ["bbbb", "aaaa"], "fit all the same"


def test_a_node_that_ray_drains_gets_no_gang() -> None:
    seen = view(node("aaaa"), node("bbbb", replicas=8))
    leaving = replace(seen.nodes[NodeId("aaaa" * 14)], drains_by_s=99.0)
    assert chosen(replace(seen, nodes={**seen.nodes, leaving.id: leaving}), want(8)) == ["bbbb"]


def test_one_domain_holds_the_whole_gang_or_there_is_none() -> None:
    seen = view(
        node("aaaa", domain="x"),
        node("bbbb", domain="y", replicas=8),
        node("cccc", domain="y", replicas=8),
        node("dddd", domain="z", replicas=8),
        node("eeee", domain="z", replicas=8),
        node("ffff", domain="z", replicas=8),
    )
    in_one = replace(want(16), one_domain=True)
    assert chosen(seen, in_one) == ["bbbb", "cccc"], "the smallest that holds it"
    assert chosen(seen, replace(in_one, max_gpus=24)) == ["dddd", "eeee", "ffff"]
    assert chosen(seen, replace(in_one, max_gpus=99)) == ["dddd", "eeee", "ffff"], "as much as one domain gives"
    assert chosen(seen, replace(in_one, max_gpus=32, min_gpus=32)) is None
    assert chosen(seen, replace(in_one, max_gpus=32, min_gpus=32, one_domain=False)) is not None
    assert (most_ever(seen, in_one), most_ever(seen)) == (24, 48)


def test_the_gangs_shape() -> None:
    seen = view(node("aaaa"), node("bbbb", replicas=8), node("cccc", replicas=8), node("dddd", slots=4))
    whole = replace(want(16), gpus_per_node=8)
    assert chosen(seen, whole, quarantined("aaaa")) == ["bbbb", "cccc"]
    assert chosen(seen, replace(whole, max_gpus=24, min_gpus=24), quarantined("aaaa")) is None
    seven = replace(whole, gpus_per_node=7, max_gpus=21, min_gpus=21)
    assert chosen(seen, seven, quarantined("aaaa")) == ["aaaa", "bbbb", "cccc"], "each node gives seven, none more"
    assert chosen(seen, replace(seven, max_gpus=22, min_gpus=22), quarantined("aaaa")) is None
    assert most_ever(seen, replace(whole, gpus_per_node=16)) == 0


def running(name: str, on: NodeId, committed_at_s: float | None, ranks: int = 8) -> tuple[Book, GangReport]:
    spec = ClaimSpec(name=name, claim_class="scavenger", max_gpus=8, min_gpus=8, owner="t")
    claim = ClaimId(name)
    steps = (ClaimState.DRAINING, ClaimState.GRANTED, ClaimState.RUNNING)
    book = apply(Book(), File(claim=claim, spec=spec, at_s=10.0))
    for state in steps:
        nodes = (on,) if state is ClaimState.DRAINING else None
        book = apply(book, Advance(claim=claim, to=state, reason="", at_s=20.0, nodes=nodes))
    report = GangReport(
        claim=claim,
        at_s=100.0,
        phase=GangPhase.RUNNING,
        gang_generation=Generation(1),
        step=5,
        world_size=ranks,
        committed_at_s=committed_at_s,
    )
    return book, report


def test_least_work_lost() -> None:
    """GPU-seconds since the newest commit; a gang that never committed loses all since it runs."""
    seen = view(node("aaaa"), node("bbbb"), node("cccc"))
    old, report_old = running("old", NodeId("aaaa" * 14), committed_at_s=40.0)
    new, report_new = running("new", NodeId("bbbb" * 14), committed_at_s=90.0)
    never, report_never = running("never", NodeId("cccc" * 14), committed_at_s=None)
    book = replace(Book(), claims={**old.claims, **new.claims, **never.claims})
    seen = replace(seen, gangs={report.claim: report for report in (report_old, report_new, report_never)})
    assert [work_lost_s(seen, book.claims[ClaimId(name)], 100.0) for name in ("old", "new", "never")] == [480, 80, 640]
    assert place(seen, book, want(8), True, now_s=100.0) is None
    all_three = (ClaimId("old"), ClaimId("new"), ClaimId("never"))
    found = place(seen, book, want(16), True, taking_from=all_three, now_s=100.0)
    assert found is not None
    assert [name[:4] for name in found.nodes] == ["bbbb", "aaaa"]
    found = place(seen, book, want(8), True, taking_from=(ClaimId("never"),), now_s=100.0)
    assert found is not None
    assert [name[:4] for name in found.nodes] == ["cccc"], "only from those that may be asked"


def fleet(count: int) -> View:
    return view(
        *(node(f"{number:04x}", domain=f"rack-{number % 97}", replicas=number * 7 % 9) for number in range(count))
    )


def test_a_hundred_thousand_gpus_are_placed_in_no_time() -> None:
    """n log n with a small constant, for nodes, holders and quarantines alike: 12,500 nodes, half of them held by one
    claim, 200 quarantines. Quadratic work would take minutes here."""
    small, large = fleet(1250), fleet(12_500)

    def seconds(seen: View) -> float:
        names = list(seen.nodes)
        book, _ = running("other", names[0], None)
        held = replace(book.claims[ClaimId("other")], nodes=tuple(names[::2]))
        bad = quarantined(*(name[:4] for name in names[1 : 2 * len(names) // 125 : 2]))
        book = replace(book, claims={held.id: held}, quarantines=bad.quarantines)
        best = math.inf
        for _ in range(3):
            began_s = time.thread_time()
            found = place(seen, book, want(len(names) * 2), True)
            best = min(best, time.thread_time() - began_s)
            assert found is not None
            assert set(found.nodes).isdisjoint(names[::2])
        return best

    assert seconds(large) < 40 * max(seconds(small), 1e-3)
    assert seconds(large) < 1.0
