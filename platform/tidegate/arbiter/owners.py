"""Who owns each GPU now: the book and the view as goodput owners. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from tidegate.arbiter.book import Book
from tidegate.arbiter.claim import Claim
from tidegate.arbiter.messages import GangPhase
from tidegate.arbiter.states import ClaimState
from tidegate.arbiter.view import NodeSeen, View, fit_gpus, gpus_of, tier_of
from tidegate.ids import GpuId, Tier, pool_name
from tidegate.telemetry.goodput import Owner

_OF_PHASE: Mapping[GangPhase, Owner] = {
    GangPhase.FORMING: Owner.FORMING,
    GangPhase.RUNNING: Owner.PRODUCTIVE,
    GangPhase.RESTARTING: Owner.RESTARTING,
    GangPhase.RECOMPUTING: Owner.RECOMPUTED,
    GangPhase.FINISHING: Owner.FINISHING,
    GangPhase.FINISHED: Owner.FINISHING,
    GangPhase.FAILED: Owner.FINISHING,
    GangPhase.LEFT: Owner.FINISHING,
}


def owners(book: Book, view: View) -> dict[str, Owner]:
    """The owner of every GPU of every live node now."""
    found: dict[str, Owner] = {}
    ranks = {gang.claim: frozenset(gang.gpus) for gang in view.gangs.values()}
    for node in view.nodes.values():
        claim = book.holder_of(node.id)
        if claim is not None and claim.grant is not None and node.id not in claim.joining:
            found |= _of_gang(book, view, node, claim, ranks.get(claim.id, frozenset()))
        else:
            found |= _of_serving(book, view, node, claim)
    return found


def _of_gang(book: Book, view: View, node: NodeSeen, claim: Claim, ranks: frozenset[GpuId]) -> dict[str, Owner]:
    gang = view.gangs.get(claim.id)
    phase = _OF_PHASE[gang.phase] if gang is not None else Owner.FORMING
    if claim.state is ClaimState.PREEMPTED:  # what it still does is for leaving
        phase = Owner.FINISHING
    return {
        gpu.uuid: Owner.QUARANTINED
        if gpu.uuid not in ranks and tier_of(book, node.id, gpu.uuid) is not Tier.GANG
        else phase
        for gpu in gpus_of(view, node)
    }


def _of_serving(book: Book, view: View, node: NodeSeen, claim: Claim | None) -> dict[str, Owner]:
    """A node that replicas have, or leave for `claim`. The arbiter does not know which GPU a replica has."""
    pool = view.pools.get(pool_name(node.id))
    held = [Owner.SERVING_IDLE if claim is None else Owner.DRAINING] * (pool.running if pool else 0)
    if pool is not None:
        held += [Owner.STARTING] * pool.starting + [Owner.DRAINING] * pool.stopping
    usable = fit_gpus(view, book, node, Tier.GANG, Tier.SERVE)
    rest = [gpu.uuid for gpu in gpus_of(view, node) if gpu.uuid not in usable]
    empty = _waits_for(claim)
    return {gpu: held.pop(0) if held else Owner.QUARANTINED if gpu in rest else empty for gpu in (*usable, *rest)}


def _waits_for(claim: Claim | None) -> Owner:
    """Whose time it is that a GPU without any process spends."""
    if claim is None:
        return Owner.FREE
    if claim.joining:
        return Owner.FORMING  # free for a gang that comes over after its next checkpoint
    # A gang that has run forms again: on a node less, or a better one.
    return Owner.RESTARTING if claim.runs_since_s is not None else Owner.DRAINING
