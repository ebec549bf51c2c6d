"""What a node's memory holds, over the network: an agent serves its node's folder, and sends its copies to a buddy.

Both ends speak `multiprocessing.connection`'s frames, which prove that they know the run's secret; what is in them is
JSON and bytes, never a pickle. Nothing here imports torch: a node's agent has none.
"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import re
import socket
import threading
from collections.abc import Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

from tidegate.checkpoint.files import write_renamed
from tidegate.checkpoint.folders import HELD, SlotFolder, room_problem, seal_of
from tidegate.checkpoint.manifest import Manifest
from tidegate.checkpoint.memory import Copy, LocalShelf
from tidegate.checkpoint.sums import PAGE, image_problem
from tidegate.errors import CheckpointError

log = logging.getLogger(__name__)

ANSWER_DEADLINE_S = 10.0
CONNECT_DEADLINE_S = 2.0
LOOK_EVERY_S = 0.25
"""How often an agent looks whether its ranks have made new copies."""

_FRAME_BYTES = 4 << 20
_NICE = 10
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_BROKEN = (OSError, EOFError, AuthenticationError, ValueError)


class ShelfServer:
    """Lends a node's copies to whoever knows the secret, and keeps copies of other nodes."""

    def __init__(self, folder: Path, secret: bytes, address: str = "") -> None:
        self._folder, self._secret = folder, secret
        self._listener = Listener((address, 0), "AF_INET", backlog=64)
        self.port: int = self._listener.address[1]
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, name="shelf", daemon=True).start()

    def close(self) -> None:
        self._listener.close()
        # Closing alone doesn't wake a thread that waits in accept.
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", self.port), timeout=1.0).close()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), name="shelf-of-one", daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        _lower_this_thread()
        with connection:
            try:
                # Here and not in `accept`, where one who says nothing would keep all others waiting.
                deliver_challenge(connection, self._secret)
                answer_challenge(connection, self._secret)
                self._answer(connection)
            except EOFError:
                pass
            except _BROKEN as error:
                log.warning("a caller is sent away: %s", error)

    def _answer(self, connection: Connection) -> None:
        shelf = LocalShelf(self._folder)
        copies: dict[str, Copy] = {}
        while True:
            asked = json.loads(connection.recv_bytes())
            if asked["ask"] == "copies":
                copies = {copy.key: copy for copy in shelf.copies()}
                listed = [[key, copy.about.model_dump_json()] for key, copy in copies.items()]
                connection.send_bytes(json.dumps(listed).encode())
            elif asked["ask"] == "read":
                self._lend(connection, shelf, copies.get(asked["key"]), asked)
            else:
                about = Manifest.model_validate_json(asked["about"])
                problem = self._keep(connection, asked["node"], asked["rank"], about)
                connection.send_bytes(json.dumps(problem).encode())

    def _lend(self, connection: Connection, shelf: LocalShelf, copy: Copy | None, asked: dict[str, Any]) -> None:
        try:
            if copy is None:
                raise CheckpointError(f"{asked['key']}: not on this shelf")
            if asked["count"] > copy.shard.bytes:
                raise CheckpointError(f"{asked['key']}: has {copy.shard.bytes} bytes")
            scratch = memoryview(mmap.mmap(-1, -(-asked["count"] // PAGE) * PAGE))
            view = shelf.view(copy, asked["offset"], asked["count"], scratch)
        except CheckpointError as error:
            connection.send_bytes(json.dumps(str(error)).encode())
            return
        connection.send_bytes(b"null")
        connection.send_bytes(view)

    def _keep(self, connection: Connection, node: str, rank: int, about: Manifest) -> str | None:
        """Take in a copy of another node's rank; why not, if not. It comes in the place of the older of two."""
        shard = about.files[0]
        if not _NAME.fullmatch(node):
            raise ValueError(node)
        folder = SlotFolder(self._folder / HELD / node)
        folder.path.mkdir(parents=True, exist_ok=True)
        paths = [folder.path / f"{rank}.a", folder.path / f"{rank}.b"]
        with self._lock:
            sealed = folder.sealed()
            path = min(
                paths, key=lambda path: (sealed[path].step, sealed[path].generation) if path in sealed else (-1, -1)
            )
            problem = room_problem([path], shard.bytes)
            connection.send_bytes(json.dumps(problem).encode())
            if problem is not None:
                return problem
            seal_of(path).unlink(missing_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.ftruncate(handle, shard.bytes)
                os.posix_fallocate(handle, 0, shard.bytes)
                memory = memoryview(mmap.mmap(handle, shard.bytes))
            finally:
                os.close(handle)
            done = 0
            while done < shard.bytes:
                await_answer(connection)  # a sender may be gone without a word
                done += connection.recv_bytes_into(memory, done)
            problem = image_problem(memory, shard.header_bytes, shard.xxh3_128)
            if problem is None:
                write_renamed(seal_of(path), about.model_dump_json().encode())
            return problem


class RemoteShelf:
    """Another node's copies, asked of its agent."""

    label = "buddy"

    def __init__(self, address: str, port: int, secret: bytes) -> None:
        self._address, self._port, self._secret = address, port, secret
        self._here = threading.local()
        self._connections: list[Connection] = []

    def copies(self) -> Sequence[Copy]:
        try:
            connection = self._connection()
            listed = ask(connection, {"ask": "copies"})
            return [Copy(key, Manifest.model_validate_json(about)) for key, about in listed]
        except _BROKEN as error:
            self._here.__dict__.clear()
            raise CheckpointError(f"{self._address}:{self._port}: {error}") from None

    def view(self, copy: Copy, offset: int, count: int, scratch: memoryview) -> memoryview:
        try:
            connection = self._connection()
            if not getattr(self._here, "listed", False):  # the other end lends what it has listed to this connection
                ask(connection, {"ask": "copies"})
                self._here.listed = True
            problem = ask(connection, {"ask": "read", "key": copy.key, "offset": offset, "count": count})
            if problem is not None:
                raise CheckpointError(f"{self._address}: {problem}")
            await_answer(connection)
            if connection.recv_bytes_into(scratch) != count:
                raise EOFError("fewer bytes than asked for")
        except _BROKEN as error:
            raise CheckpointError(f"{copy.shard.name} from {self._address}:{self._port}: {error}") from None
        return scratch[:count]

    def close(self) -> None:
        while self._connections:
            self._connections.pop().close()
        self._here = threading.local()

    def _connection(self) -> Connection:
        if not hasattr(self._here, "connection"):
            self._here.connection = connect(self._address, self._port, self._secret)
            self._connections.append(self._here.connection)
        found: Connection = self._here.connection
        return found


class Buddy:
    """Sends this node's newest copies to another node, in a thread that gives way."""

    def __init__(self, folder: Path, node: str, secret: bytes) -> None:
        self._folder, self._node, self._secret = folder, node, secret
        self._to: tuple[str, int] | None = None
        self._sent: dict[int, tuple[int, int]] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="buddy", daemon=True)
        self._thread.start()

    def send_to(self, address: str, port: int) -> None:
        self._sent, self._to = {}, (address, port)

    def send_to_nobody(self) -> None:
        self._to = None

    def close(self) -> None:
        self._ended.set()

    def _run(self) -> None:
        _lower_this_thread()
        seen = 0
        while not self._ended.wait(LOOK_EVERY_S):
            to = self._to
            try:
                changed = self._folder.stat().st_mtime_ns
            except OSError:
                continue
            if to is None or changed == seen:
                continue
            try:
                self._send_newest(*to)
                seen = changed
            except (*_BROKEN, CheckpointError) as error:
                log.warning("no copy on %s:%d: %s", *to, error)

    def _send_newest(self, address: str, port: int) -> None:
        """All ranks' copies of the newest step that all of them have: parts of several steps make no checkpoint."""
        sealed = SlotFolder(self._folder).sealed()
        ranks = {int(path.name.split(".")[0]) for path in sealed}
        steps = [
            {(about.step, about.generation) for path, about in sealed.items() if path.name.startswith(f"{rank}.")}
            for rank in ranks
        ]
        common = set.intersection(*steps) if steps else set()
        if not common:
            return
        newest = max(common)
        with contextlib.closing(connect(address, port, self._secret)) as connection:
            for path, about in sealed.items():
                rank = int(path.name.split(".")[0])
                if (about.step, about.generation) == newest and self._sent.get(rank) != newest:
                    send_copy(connection, path, self._node, rank, about)
                    self._sent[rank] = newest


def send_copy(connection: Connection, path: Path, node: str, rank: int, about: Manifest) -> None:
    """
    Raises:
        CheckpointError: the other end has no room for it, or it changed on the way.
        OSError, EOFError: the connection broke.
    """
    size = about.files[0].bytes
    with path.open("rb") as file:
        memory = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
    order = {"ask": "keep", "node": node, "rank": rank, "about": about.model_dump_json()}
    problem = ask(connection, order)
    if problem is None:
        for at in range(0, size, _FRAME_BYTES):
            connection.send_bytes(memory[at : min(at + _FRAME_BYTES, size)])
    await_answer(connection)
    problem = json.loads(connection.recv_bytes())
    if problem is not None:
        raise CheckpointError(problem)


def connect(address: str, port: int, secret: bytes) -> Connection:
    """
    Raises:
        OSError, EOFError: nobody answers there.
        AuthenticationError: one of us doesn't know the secret.
    """
    # `Client` would wait for a dead machine for minutes.
    socket.create_connection((address, port), timeout=CONNECT_DEADLINE_S).close()
    connection: Connection = Client((address, port), "AF_INET")
    try:
        answer_challenge(connection, secret)
        deliver_challenge(connection, secret)
    except BaseException:
        connection.close()
        raise
    return connection


def ask(connection: Connection, what: dict[str, Any]) -> Any:
    connection.send_bytes(json.dumps(what).encode())
    await_answer(connection)
    return json.loads(connection.recv_bytes())


def await_answer(connection: Connection) -> None:
    if not connection.poll(ANSWER_DEADLINE_S):
        raise OSError(f"no answer within {ANSWER_DEADLINE_S:g} s")


def _lower_this_thread() -> None:
    """Linux has priorities of threads."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
