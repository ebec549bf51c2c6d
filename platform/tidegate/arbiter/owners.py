"""Who owns each GPU now: the book and the view as goodput owners. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from tidegate.arbiter.book import Book, ClaimState
from tidegate.arbiter.messages import GangPhase
from tidegate.arbiter.view import View, fit_gpus, gpus_of, tier_of
from tidegate.ids import Tier, pool_name
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
    for node in view.nodes.values():
        gpus = [gpu.uuid for gpu in gpus_of(view, node)]
        claim = book.holder_of(node.id)
        pool = view.pools.get(pool_name(node.id))
        running = pool.running if pool else 0
        if claim is not None and claim.grant is not None:
            gang = view.gangs.get(claim.id)
            phase = _OF_PHASE[gang.phase] if gang is not None else Owner.FORMING
            ranks = set(gang.gpus) if gang is not None else set()
            for gpu in gpus:
                quarantined = tier_of(book, node.id, gpu) is not Tier.GANG
                found[gpu] = Owner.QUARANTINED if quarantined and gpu not in ranks else phase
            continue
        draining = claim is not None and claim.state is ClaimState.DRAINING
        held = [Owner.DRAINING if draining else Owner.SERVING_IDLE] * running
        if pool is not None:
            held += [Owner.STARTING] * pool.starting + [Owner.DRAINING] * pool.stopping
        usable = list(fit_gpus(view, book, node, Tier.GANG, Tier.SERVE))
        rest = [gpu for gpu in gpus if gpu not in usable]
        for gpu in (*usable, *rest):
            idle = Owner.QUARANTINED if gpu in rest else Owner.DRAINING if draining else Owner.FREE
            found[gpu] = held.pop(0) if held else idle
    return found
