"""The process that brings a rank's saves to disk, so that neither Python's lock nor a busy disk holds up training.

It has the slots' memory from its parent, gives way to all others at CPU and disk, and imports next to nothing. As long
as nobody waits for a file, it leaves the disk alone for a part of the time: a save has until the next one is due, and
what it takes from the machine while it drains, the steps beside it feel. Lines of JSON go in and out:

    {"memory": "/proc/7/fd/5", "bytes": 8192, "header_bytes": 4096, "path": "…"}   begin: all but the header
    {"hurry": true}                                                somebody waits: as fast as the disk can
    {}                                                             the header is complete: write it, make all durable
    <- {"errno": 0, "path": "…"}

When its input ends it ends at once: a dead rank's save must not go on.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import itertools
import json
import mmap
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_PAGE = 4096
_CHUNK_BYTES = 4 << 20
_STREAMS = 4
"""More than one keeps a disk's queue filled; from four on it makes no difference (measured on NVMe)."""
_DIRECT_FROM_BYTES = 1 << 20
BUSY_SHARE = 0.6
"""Of the time, while nobody waits. At all of it a step beside it took 1.12 times as long on two cores, as it does
beside raw direct writes of as many bytes."""

_LEAVE_DEADLINE_S = 5.0
_NICE = 10
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
"""The number of a system call that has no wrapper."""
_WHO_PROCESS, _BEST_EFFORT_LAST = 1, (2 << 13) | 7


class WriterGoneError(OSError):
    """The writer has ended; the next save starts another."""


class Writer:
    """The parent's side: one file at a time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(Path(__file__).resolve())], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def begin(self, memory: int, size: int, header_bytes: int, path: Path) -> None:
        """Write the first `size` bytes of the memory behind this handle, of which the header is not complete yet.

        Raises:
            WriterGoneError: it has ended.
        """
        name = f"/proc/{os.getpid()}/fd/{memory}"
        self._tell({"memory": name, "bytes": size, "header_bytes": header_bytes, "path": str(path)})

    def hurry(self) -> None:
        """Somebody waits for the file that was begun, from whichever thread. Nothing happens where none was."""
        with contextlib.suppress(WriterGoneError, ValueError):  # ended meanwhile; whoever ends the file tells of it
            self._tell({"hurry": True})

    def end(self) -> None:
        """The header is complete: wait until the file is durable.

        Raises:
            OSError: the disk's own, or `WriterGoneError`.
        """
        self._tell({})
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        if not answer:
            raise self._gone()
        told = json.loads(answer)
        if told["errno"]:
            raise OSError(told["errno"], os.strerror(told["errno"]), told["path"])

    def close(self) -> None:
        """End it, in the middle of a file too."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_LEAVE_DEADLINE_S)
        except subprocess.TimeoutExpired:  # held up by its disk
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _tell(self, line: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(line).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._gone() from None

    def _gone(self) -> WriterGoneError:
        return WriterGoneError(errno.EPIPE, f"the writer has ended with {self._process.wait()}")


class PacedFile:
    """A file that is being written, by direct I/O where the file system takes it."""

    def __init__(self, path: Path, memory: memoryview, size: int, rest: Callable[[float], object]) -> None:
        """`rest`: called after each write, with the seconds that its stream should leave the disk alone."""
        self._path, self._memory, self._size, self._rest = path, memory, size, rest
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self._direct = size >= _DIRECT_FROM_BYTES
        try:
            self._handle = os.open(path, flags | (os.O_DIRECT if self._direct else 0), 0o644)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._direct:
                raise
            self._direct = False
            self._handle = os.open(path, flags, 0o644)
        # Room for all of it is taken at once: a full disk is seen now, and streams needn't wait for each other to
        # make the file longer.
        os.posix_fallocate(self._handle, 0, size)

    def write(self, begin: int, end: int) -> None:
        """Both at whole pages; pages past the size are cut off in the end."""
        chunks = itertools.count(begin, _CHUNK_BYTES)
        errors: list[OSError] = []

        def stream() -> None:
            for at in chunks:
                if at >= end or errors:
                    return
                began_s = time.monotonic()
                try:
                    self._put(at, min(at + _CHUNK_BYTES, end))
                except OSError as error:
                    errors.append(error)
                self._rest((time.monotonic() - began_s) * (1 / BUSY_SHARE - 1))

        threads = [threading.Thread(target=stream) for _ in range(min(_STREAMS, -(-(end - begin) // _CHUNK_BYTES)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def _put(self, at: int, end: int) -> None:
        while at < end:
            try:
                at += os.pwrite(self._handle, self._memory[at:end], at)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._direct = False  # a disk with larger sectors than a page
                fcntl.fcntl(self._handle, fcntl.F_SETFL, fcntl.fcntl(self._handle, fcntl.F_GETFL) & ~os.O_DIRECT)

    def finish(self) -> None:
        os.ftruncate(self._handle, self._size)
        os.fsync(self._handle)

    def close(self) -> None:
        os.close(self._handle)


def _serve() -> None:
    os.nice(_NICE)
    number = _IOPRIO_SET.get(os.uname().machine)
    if number is not None:
        ctypes.CDLL(None).syscall(number, _WHO_PROCESS, 0, _BEST_EFFORT_LAST)
    lines: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    hurry = threading.Event()
    threading.Thread(target=_listen, args=(lines, hurry), daemon=True).start()
    memories = _Memories()
    while True:
        order = lines.get()
        path, size = Path(order["path"]), order["bytes"]
        try:
            memory = memories.of(order["memory"], size)
            _write(path, memory, size, order["header_bytes"], complete=lines.get, rest=hurry.wait)
            code = 0
        except OSError as error:
            code = error.errno or errno.EIO
            with contextlib.suppress(OSError):
                path.unlink()  # its room may be what the others lack
        print(json.dumps({"errno": code, "path": order["path"]}), flush=True)  # noqa: T201


def _write(
    path: Path,
    memory: memoryview,
    size: int,
    header_bytes: int,
    *,
    complete: Callable[[], object],
    rest: Callable[[float], object],
) -> None:
    """Raises OSError after `complete` has been called, as if it had gone well until then."""
    try:
        file = PacedFile(path, memory, size, rest)
    except OSError:
        complete()
        raise
    try:
        try:
            file.write(header_bytes, len(memory))
        finally:
            complete()
        file.write(0, header_bytes)
        file.finish()
    finally:
        file.close()


class _Memories:
    """Mapped once: the kernel would otherwise look up every page anew in each save."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int, int], memoryview] = {}

    def of(self, name: str, size: int) -> memoryview:
        padded = -(-size // _PAGE) * _PAGE
        handle = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            status = os.fstat(handle)
            key = (status.st_dev, status.st_ino, padded)
            if key not in self._known:
                memory = mmap.mmap(handle, padded, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
                self._known = {**dict(list(self._known.items())[-1:]), key: memoryview(memory)}
            return self._known[key]
        finally:
            os.close(handle)


def _listen(lines: queue.SimpleQueue[dict[str, Any]], hurry: threading.Event) -> None:
    for line in sys.stdin:
        told = json.loads(line)
        if "hurry" in told:
            hurry.set()
            continue
        if told:  # another file, for which nobody waits yet
            hurry.clear()
        lines.put(told)
    os._exit(0)


if __name__ == "__main__":
    _serve()
