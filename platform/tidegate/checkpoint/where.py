"""From what a person types, a run's directory or a store's address, to the places that are meant."""

from __future__ import annotations

from pathlib import Path

from tidegate.checkpoint.address import is_address, parse_address
from tidegate.checkpoint.places import Place, disk_of, memory_of
from tidegate.checkpoint.store_file import read_store_file
from tidegate.checkpoint.tiers import Tier
from tidegate.errors import CheckpointError


def places_of(where: str, endpoint: str | None = None) -> tuple[Place, ...]:
    """Where checkpoints are kept for long, the nearest first. A run's directory knows its store.

    Raises:
        CheckpointError: it is neither a run's directory nor an address.
    """
    if is_address(where):
        return (_store(where, endpoint),)
    disk, store = disk_of(Path(where)), read_store_file(Path(where))
    return (disk,) if store is None else (disk, _store(store.store, endpoint or store.endpoint))


def tiers_of(where: str, endpoint: str | None = None) -> tuple[Tier, ...]:
    """As `places_of`, and before them the copies in this machine's memory."""
    places = places_of(where, endpoint)
    return places if is_address(where) else (*memory_of(Path(where)), *places)


def _store(address: str, endpoint: str | None) -> Place:
    # botocore is imported by those alone who have a store.
    from tidegate.checkpoint.object_store import ObjectStore

    try:
        return ObjectStore(parse_address(address), endpoint)
    except ValueError as error:
        raise CheckpointError(str(error)) from None
