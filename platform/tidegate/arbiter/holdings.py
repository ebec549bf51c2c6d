"""Which claim held which GPUs, and when: the journal read as history. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tidegate.arbiter.book import Book, apply
from tidegate.arbiter.moves import Advance, File, Give, Impose, Join, Move
from tidegate.ids import ClaimId, GpuId, NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """Some GPUs of one claim, from `start_s` to `end_s`. No GPU is in two holdings at a time."""

    claim: ClaimId
    run: str
    start_s: float
    end_s: float
    gpus: frozenset[GpuId]
    """All of its nodes' GPUs that the journal knows by name: granted once, or quarantined."""


def holdings(moves: Iterable[tuple[float, Move]], until_s: float) -> tuple[Holding, ...]:
    """Every holding up to `until_s`, by its start; `moves` are the journal's, each with its time.

    It begins when the claim's nodes are closed to others, so the drain for it is part of it. Nodes of a claim that was
    asked to leave are its own until it has left.
    """
    book = Book()
    run_of: dict[ClaimId, str] = {}
    gpus_of: dict[NodeId, set[GpuId]] = {}
    held: Mapping[ClaimId, frozenset[NodeId]] = {}
    since_s: dict[ClaimId, float] = {}
    ended: list[tuple[ClaimId, float, float, frozenset[NodeId]]] = []
    for at_s, move in moves:
        book = apply(book, move)
        match move:
            case File():
                run_of[move.claim] = move.spec.name
            case Give():
                for granted in move.grant.nodes:
                    gpus_of.setdefault(granted.node, set()).update(granted.gpus)
            case Impose() if move.verdict.gpu is not None:
                gpus_of.setdefault(move.verdict.node, set()).add(move.verdict.gpu)
            case Advance() | Join():
                now = _held(book)
                for claim in held.keys() | now.keys():
                    if held.get(claim) != now.get(claim):
                        if claim in held:
                            ended.append((claim, since_s[claim], at_s, held[claim]))
                        since_s[claim] = at_s
                held = now
            case _:
                pass
    ended += [(claim, since_s[claim], until_s, nodes) for claim, nodes in held.items()]
    return tuple(
        Holding(
            claim=claim,
            run=run_of[claim],
            start_s=start_s,
            end_s=min(end_s, until_s),
            gpus=frozenset(gpu for node in nodes for gpu in gpus_of.get(node, ())),
        )
        for claim, start_s, end_s, nodes in sorted(ended, key=lambda row: row[1])
        if start_s < min(end_s, until_s)
    )


def _held(book: Book) -> Mapping[ClaimId, frozenset[NodeId]]:
    nodes: dict[ClaimId, set[NodeId]] = {}
    for node, claim in book.holders.items():
        nodes.setdefault(claim.id, set()).add(node)
    return {claim: frozenset(held) for claim, held in nodes.items()}
