"""The book as JSON and back, so that a restart need not replay years of moves. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeAlias, get_type_hints

from pydantic import TypeAdapter, ValidationError

from tidegate.arbiter.book import Book, HeldBack, Quarantine
from tidegate.arbiter.moves import hold_of

_BY_HOLD: Mapping[str, TypeAdapter[Any]] = {
    "quarantines": TypeAdapter(tuple[Quarantine, ...]),
    "held_back": TypeAdapter(tuple[HeldBack, ...]),
}
"""Their keys are no words, which JSON's must be, and follow from their values."""
_PARTS: Mapping[str, TypeAdapter[Any]] = {
    name: TypeAdapter(hint) for name, hint in get_type_hints(Book).items() if name not in _BY_HOLD
} | dict(_BY_HOLD)
Parts: TypeAlias = dict[str, Any]


class NotThisBookError(ValueError):
    """What was kept is not a book as this version of the arbiter has it."""


def book_to_json(book: Book) -> Parts:
    """The book's parts by name, in values that `json` can write."""
    found = {}
    for part in fields(book):
        value = getattr(book, part.name)
        kept = tuple(value.values()) if part.name in _BY_HOLD else value
        found[part.name] = _PARTS[part.name].dump_python(kept, mode="json")
    return found


def book_from_json(parts: Parts) -> Book:
    """
    Raises:
        NotThisBookError: a part is missing, unknown or unreadable.
    """
    if set(parts) != set(_PARTS):
        raise NotThisBookError(f"it has the parts {sorted(parts)}, not {sorted(_PARTS)}")
    try:
        found = {name: adapter.validate_python(parts[name]) for name, adapter in _PARTS.items()}
    except ValidationError as error:
        raise NotThisBookError(str(error)) from None
    for name in _BY_HOLD:
        found[name] = {hold_of(one.verdict): one for one in found[name]}
    return Book(**found)
