"""How many replicas each pool should have now. Pure.

Pools follow the nodes: one that joins gets a pool, one that is gone loses it. A new pool is empty.

A pool's target is lowered only for a claim or a node that drains, and raised only when the GPUs are really free: a
replica that waits for a GPU would win it against a pending placement group (Ray serves actors first).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from tidegate.arbiter.book import Book
from tidegate.arbiter.messages import GatewayReport, PoolPlan, Spillway
from tidegate.arbiter.moves import LayPools, SetTarget
from tidegate.arbiter.sizing import replicas_for
from tidegate.arbiter.view import NodeSeen, PoolSeen, View, count_fit
from tidegate.ids import PoolName, Tier, pool_name
from tidegate.spec.policy import ServingSpec

STEP_PATIENCE_S = 120.0
"""One node whose replicas do not come up must not keep the others from serving."""


LAY_EVERY_S = 5.0
"""Between two changes of which pools there are: Serve takes a moment to show one, and nodes that join one after the
other get their pools together."""


def layings(view: View, book: Book, gateways: Iterable[GatewayReport], now_s: float) -> tuple[LayPools, ...]:
    """Which pools to build or to take away, so that each node that stays has one of the newest plan, and no other has.

    Where Serve's controller is away nothing is seen, so nothing is changed.
    """
    if now_s - book.laid_at_s < LAY_EVERY_S:
        return ()
    if not view.serves:
        if not view.pools and not view.strays:
            return ()
        gone = (*view.pools, *sorted(view.strays))
        reason = "the application is gone, and its pools go after it"
        return (LayPools(plan=None, targets={}, pools=gone, reason=reason, at_s=now_s),)
    plan = max((gateway.plan for gateway in gateways if gateway.plan is not None), key=_built_at_s, default=None)
    if plan is None:
        return ()
    there = view.pools
    new = [n for n in view.nodes.values() if n.drains_by_s is None and pool_name(n.id) not in there]
    old = [name for name, pool in there.items() if pool.plan != plan.version]
    if not (new or old or view.strays):
        return ()
    stay = [node for node in view.nodes if pool_name(node) in there]
    targets = {node: book.targets.get(pool_name(node), there[pool_name(node)].target) for node in stay}
    said = (
        (len(new), "nodes have joined"),
        (len(view.strays), "nodes are gone"),
        (len(old), "pools are of an older plan"),
    )
    return (
        LayPools(
            plan=plan,
            # Empty: `raises` fills them when the GPUs are free.
            targets=targets | {node.id: 0 for node in new},
            pools=(*(pool_name(node.id) for node in new), *sorted(view.strays), *old),
            reason=", ".join(f"{count} {what}" for count, what in said if count),
            at_s=now_s,
        ),
    )


def _built_at_s(plan: PoolPlan) -> float:
    return plan.at_s


def room_for_serving(view: View, book: Book, node: NodeSeen) -> int:
    """Replicas that the node may hold now: its usable GPUs, none while a claim has it or when it is to go."""
    if node.drains_by_s is not None or book.holder_of(node.id) is not None:
        return 0
    return count_fit(view, book, node, Tier.GANG, Tier.SERVE)


def astray(view: View, book: Book) -> tuple[PoolSeen, ...]:
    """The pools that are not as the book has them: Serve has another target, the book none, or more replicas are there
    than there should be. Usually these are few."""
    ours = book.targets.get
    pools = view.pools.values()
    return tuple([p for p in pools if ours(p.name) != p.target or p.running + p.starting > p.target])


def wanted(view: View, book: Book, spec: ServingSpec) -> Mapping[PoolName, int]:
    """The target each deployed pool is heading for, were all GPUs free that should be.

    Where replicas go by load, those that are there stay where they are: the fullest pools are filled first, so that
    whole nodes become free.
    """
    room = {
        pool_name(node.id): room_for_serving(view, book, node)
        for node in view.nodes.values()
        if pool_name(node.id) in view.pools
    }
    if view.load is None or spec.sizing is None:
        return room
    now = {name: book.targets.get(name, view.pools[name].target) for name in room}
    left = replicas_for(view.load, spec.sizing, sum(now.values()))
    share = {}
    for name in sorted(room, key=lambda name: (-now[name], name)):
        share[name] = min(room[name], left)
        left -= share[name]
    return share


def raises(view: View, book: Book, odd: Collection[PoolSeen], spec: ServingSpec, now_s: float) -> tuple[SetTarget, ...]:
    """Targets to raise in this tick.

    With the spillway closed nothing has to move home, so every free GPU is taken at once. With it open replicas come
    in steps of `return_step_replicas`: the next step begins when all replicas of the one before are ready and
    `return_dwell_s` has passed. Replicas that do not get ready hold the others up for `STEP_PATIENCE_S` only.
    """
    returning = book.orders.spillway is Spillway.OPEN
    rested_s = now_s - book.raised_at_s
    if returning and (rested_s < spec.return_dwell_s or (rested_s < STEP_PATIENCE_S and not _settled(view))):
        return ()
    left = spec.return_step_replicas if returning else 10**9
    moves = []
    lacking = _short(view, book, odd) if view.load is None else _short_of_load(view, book, wanted(view, book, spec))
    for node, pool, short in sorted(lacking, key=lambda item: item[0].id):
        target = book.targets.get(pool.name, pool.target)
        free = max(0, int(node.free_gpu_slots) - (target - pool.running - pool.starting))
        more = min(short, free, left)
        if more > 0:
            left -= more
            reason = "training is over: replicas come home in steps" if returning else "free GPUs serve"
            moves.append(SetTarget(pool=pool.name, replicas=target + more, reason=reason, at_s=now_s))
    return tuple(moves)


def _short(view: View, book: Book, odd: Collection[PoolSeen]) -> Iterator[tuple[NodeSeen, PoolSeen, int]]:
    """Nodes whose pool is to have more replicas than it is to have now, and how many more. Only those that may have one
    now: a GPU is free there, or a replica too many has it."""
    held = book.holders
    any_node = any(pool.name not in book.held_pools for pool in odd)
    for node in [node for node in view.nodes.values() if any_node or node.free_gpu_slots >= 1]:
        pool = view.pools.get(pool_name(node.id)) if node.id not in held else None
        if pool is not None:
            short = room_for_serving(view, book, node) - book.targets.get(pool.name, pool.target)
            if short > 0:
                yield node, pool, short


def _short_of_load(view: View, book: Book, wanted: Mapping[PoolName, int]) -> Iterator[tuple[NodeSeen, PoolSeen, int]]:
    for node in view.nodes.values():
        pool = view.pools.get(pool_name(node.id))
        if pool is not None and (short := wanted[pool.name] - book.targets.get(pool.name, pool.target)) > 0:
            yield node, pool, short


def lowerings(view: View, book: Book, spec: ServingSpec, now_s: float) -> tuple[SetTarget, ...]:
    """Targets to lower because the load asks for fewer, a GPU is not even good for serving, or its node is to go; nodes
    that a claim holds drain by its own moves. What a leaving node's replicas do is finished there, and what comes new
    is answered elsewhere.

    Serve chooses which replica stops: one that is not ready goes first, and on a dead GPU none is ready for long.
    """
    moves = []
    for node_id in {**book.quarantined, **dict.fromkeys(view.leaving)}:
        node, name = view.nodes.get(node_id), pool_name(node_id)
        if node is None or name not in view.pools or book.holder_of(node_id) is not None:
            continue
        room = room_for_serving(view, book, node)
        if book.targets.get(name, view.pools[name].target) > room:
            reason = f"{room} of its GPUs are good for serving" if node.drains_by_s is None else "its node is to go"
            moves.append(SetTarget(pool=name, replicas=room, reason=reason, at_s=now_s))
    if moves or view.load is None:
        return tuple(moves)
    heading_for = wanted(view, book, spec)
    enough = f"{sum(heading_for.values())} replicas are enough for the load"
    return tuple(
        SetTarget(pool=name, replicas=count, reason=enough, at_s=now_s)
        for name, count in heading_for.items()
        if name not in book.held_pools and book.targets.get(name, view.pools[name].target) > count
    )


def reassertions(book: Book, odd: Collection[PoolSeen], now_s: float) -> tuple[SetTarget, ...]:
    """Targets that Serve has lost (a redeploy resets them to the code's number)."""
    return tuple(
        SetTarget(pool=pool.name, replicas=book.targets[pool.name], reason="Serve has another target", at_s=now_s)
        for pool in odd
        if pool.name in book.targets and pool.target != book.targets[pool.name]
    )


def all_home(view: View, book: Book, spec: ServingSpec) -> bool:
    """Every pool runs what the cluster has room for, and the load asks for."""
    heading_for = wanted(view, book, spec)
    return bool(heading_for) and all(view.pools[pool].running >= count for pool, count in heading_for.items())


def _settled(view: View) -> bool:
    return all(_is_settled(pool) for pool in view.pools.values())


def _is_settled(pool: PoolSeen) -> bool:
    return pool.running >= pool.target and pool.starting == 0
