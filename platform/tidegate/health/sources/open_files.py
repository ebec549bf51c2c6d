"""Small files that are read again and again: kept open, since opening is what reading them costs."""

from __future__ import annotations

import os

MOST = 512
"""Files kept open at a time; further ones are opened each time. A process may often have no more than 1024."""
_TEXT_BYTES = 4096


class OpenFiles:
    """Reads files from their beginning, as often as asked: sysfs makes the text anew for each such read.

    `follow` sees when a folder's files were replaced; a device that has gone answers ENODEV on a file still open, and
    then its file is opened again.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._count = 0
        self._folders: dict[str, tuple[tuple[int, int], dict[str, int]]] = {}
        """Each folder's inode and time of change when it was last followed, and its open files."""

    def follow(self, folder: str) -> None:
        """Let go of files that are no longer those of this folder: it is another one, or files came and went in it."""
        try:
            found = os.stat(folder)
        except OSError:
            self.close(folder)
            return
        mark = (found.st_ino, found.st_mtime_ns)
        known = self._folders.get(folder)
        if known is None or known[0] != mark:
            self.close(folder)
            self._folders[folder] = (mark, {})

    def text(self, folder: str, file: str) -> str:
        """
        Raises:
            OSError: it can't be opened or read.
        """
        known = self._folders.get(folder)
        descriptor = known[1].get(file) if known is not None else None
        if known is not None and descriptor is not None:
            try:
                return _text(descriptor)
            except OSError:
                del known[1][file]
                self._let_go(descriptor)
        descriptor = os.open(f"{folder}/{file}", os.O_RDONLY | os.O_CLOEXEC)
        kept = False
        try:
            text = _text(descriptor)
            if known is not None and self._count < self._most:
                known[1][file] = descriptor
                self._count += 1
                kept = True
            return text
        finally:
            if not kept:
                os.close(descriptor)

    def close(self, folder: str) -> None:
        """Let go of all of this folder's files."""
        _, files = self._folders.pop(folder, (None, {}))
        for descriptor in files.values():
            self._let_go(descriptor)

    def _let_go(self, descriptor: int) -> None:
        os.close(descriptor)
        self._count -= 1


def _text(descriptor: int) -> str:
    return os.pread(descriptor, _TEXT_BYTES, 0).decode("ascii", "replace").strip()
