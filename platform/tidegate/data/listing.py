"""The captions of a folder of images: `metadata.jsonl` as `datasets` reads it, or a text file beside each image."""

from __future__ import annotations

import json
from dataclasses import dataclass

from tidegate.data.layout import Rejected
from tidegate.data.storage import Folder
from tidegate.errors import DataError

METADATA = "metadata.jsonl"
IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif")
LONG, SHORT = ".txt", ".short.txt"
"""Endings of the files that hold an image's captions."""

_HINT = (
    f'one line per image in {METADATA}: {{"file_name": "0001.png", "text": "a caption"}}, or 0001{LONG} beside 0001.png'
)


@dataclass(frozen=True, slots=True)
class Listed:
    """An image and its captions, or the files that hold them."""

    name: str
    text: str
    short: str = ""
    in_files: bool = False
    """`text` and `short` are names of files; an empty name is an empty caption."""

    def captions(self, folder: Folder) -> tuple[str, str]:
        """Long and short. Raises OSError."""
        if not self.in_files:
            return self.text, self.short
        long, short = (folder.read(name).decode("utf-8", "replace").strip() if name else "" for name in self._names)
        return long, short

    @property
    def _names(self) -> tuple[str, str]:
        return self.text, self.short


def listed(folder: Folder) -> tuple[list[Listed], list[Rejected]]:
    """What the folder says is in it; nothing is opened yet. Rejected are lines that say nothing.

    Raises:
        DataError: no folder, or no captions in it.
    """
    files = folder.files()
    if METADATA in files:
        return _from_lines(folder)
    images = [name for name in files if name.lower().endswith(IMAGES)]
    if not images:
        what = "neither images nor captions" if files else "no such folder, or nothing in it"
        raise DataError(f"{folder}: {what}\nhint: {_HINT}")
    rows, rejected = [], []
    for name in images:
        stem = name.rpartition(".")[0]
        if stem + LONG in files:
            rows.append(Listed(name, stem + LONG, stem + SHORT if stem + SHORT in files else "", in_files=True))
        else:
            rejected.append(Rejected(source=name, why=f"no caption: no {METADATA}, and no {stem + LONG}"))
    if not rows:
        raise DataError(f"{folder}: {METADATA}: missing\nhint: {_HINT}")
    return rows, rejected


def _from_lines(folder: Folder) -> tuple[list[Listed], list[Rejected]]:
    rows, rejected = [], []
    for number, line in enumerate(folder.read(METADATA).decode("utf-8", "replace").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            name, text, short = row["file_name"], row["text"], row.get("text_short") or ""
            if not all(isinstance(value, str) for value in (name, text, short)):
                raise TypeError("`file_name`, `text` and `text_short` must be strings")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            why = f"no {error}" if isinstance(error, KeyError) else str(error)
            rejected.append(Rejected(source=f"{METADATA}:{number}", why=why))
            continue
        if ".." in name.split("/") or name.startswith("/"):
            rejected.append(Rejected(source=name, why="lies outside the folder"))
        else:
            rows.append(Listed(name, text, short))
    if not rows and not rejected:
        raise DataError(f"{folder}/{METADATA}: empty\nhint: {_HINT}")
    return rows, rejected
