"""Copies over the network: a node is gone, and its buddy has what it had."""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Iterator
from multiprocessing import AuthenticationError
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from folders import about, parts_of, tensors

from tidegate.checkpoint import shelf
from tidegate.checkpoint.folders import SlotFolder, seal_of
from tidegate.checkpoint.memory import LocalShelf, Memory
from tidegate.checkpoint.restore import restore
from tidegate.checkpoint.ring import Ring, shared_ring
from tidegate.checkpoint.shelf import Buddy, RemoteShelf, ShelfServer, connect, send_copy
from tidegate.errors import CheckpointError
from tidegate.train.parallel import joined
from waiting import wait_until

SECRET = b"of this run"


class Node:
    """One rank's copies, and an agent's ends of the network."""

    def __init__(self, root: Path, name: str, rank: int) -> None:
        self.name, self.folder, self.rank = name, root / "run" / name, rank
        self.parts = parts_of(tensors(), rank, 2)
        self.ring: Ring = shared_ring(SlotFolder(self.folder), self.parts, rank=rank, local_rank=0, newest=None)
        self.server = ShelfServer(self.folder, SECRET, "127.0.0.1")
        self.buddy = Buddy(self.folder, name, SECRET)

    def save(self, step: int) -> None:
        for part, at in zip(self.parts, parts_of(tensors(step), self.rank, 2), strict=True):
            part.local.copy_(at.local)
        slot = self.ring.take(last_is_good=True, busy=False)
        slot.fill()
        slot.seal(about(step, world_size=2))

    def remote(self) -> RemoteShelf:
        return RemoteShelf("127.0.0.1", self.server.port, SECRET)

    def close(self) -> None:
        self.buddy.close()
        self.server.close()
        self.ring.close()


@pytest.fixture
def nodes() -> Iterator[tuple[Node, Node]]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="tidegate-test-") as root:
        both = Node(Path(root), "one", 0), Node(Path(root), "two", 1)
        yield both
        for node in both:
            node.close()


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    with joined(30) as world:
        yield world.saving


def held(node: Node, other: Node) -> set[int]:
    return {manifest.step for manifest in SlotFolder(node.folder / "held" / other.name).sealed().values()}


def is_restored(memory: Memory, group: dist.ProcessGroup, step: int) -> bool:
    parts = parts_of(tensors(-1), 0, 1)
    found = restore([memory], parts, group)
    assert found.manifest is not None, found.skipped
    want = parts_of(tensors(step), 0, 1)
    return found.manifest.step == step and all(torch.equal(a.local, b.local) for a, b in zip(parts, want, strict=True))


def test_two_nodes_copies_are_one_checkpoint(nodes: tuple[Node, Node], group: dist.ProcessGroup) -> None:
    one, two = nodes
    for node in nodes:
        node.save(5)
    assert is_restored(Memory([LocalShelf(one.folder), two.remote()]), group, 5)


def test_a_lost_nodes_copies_come_from_its_buddy(nodes: tuple[Node, Node], group: dist.ProcessGroup) -> None:
    one, two = nodes
    two.buddy.send_to("127.0.0.1", one.server.port)
    for step in (5, 10, 15):
        for node in nodes:
            node.save(step)
        wait_until(lambda step=step: step in held(one, two), 10, f"the copy of step {step} at the buddy")  # type: ignore[misc]
    assert held(one, two) == {10, 15}
    two.server.close()  # and here the node is lost
    assert is_restored(Memory([LocalShelf(one.folder), two.remote()]), group, 15)
    # Another node has joined, whose rank knows of it by the network alone.
    assert is_restored(Memory([one.remote()]), group, 15)


def test_without_the_buddy_it_is_no_checkpoint(nodes: tuple[Node, Node], group: dist.ProcessGroup) -> None:
    one, two = nodes
    for node in nodes:
        node.save(5)
    two.server.close()
    found = restore([Memory([LocalShelf(one.folder), two.remote()])], parts_of(tensors(), 0, 1), group)
    assert found.manifest is None
    assert [skipped.why for skipped in found.skipped] == ["1 of 2 ranks' copies are there"]


def test_what_changes_on_its_way_is_not_kept(nodes: tuple[Node, Node]) -> None:
    """The rank makes its next copy while the last one is being sent."""
    one, two = nodes
    two.save(5)
    [(path, manifest)] = SlotFolder(two.folder).sealed().items()
    with connect("127.0.0.1", one.server.port, SECRET) as connection:
        send_copy(connection, path, "two", 0, manifest)
        with path.open("r+b") as file:
            file.seek(4096)
            file.write(b"changed")
        later = manifest.model_copy(update={"step": 10})
        with pytest.raises(CheckpointError, match="content differs from its hash"):
            send_copy(connection, path, "two", 0, later)
    assert held(one, two) == {5}


def test_who_does_not_know_the_secret_gets_and_leaves_nothing(nodes: tuple[Node, Node]) -> None:
    one, _ = nodes
    one.save(5)
    with pytest.raises(AuthenticationError):
        connect("127.0.0.1", one.server.port, b"a guess")
    with pytest.raises(CheckpointError):
        RemoteShelf("127.0.0.1", one.server.port, b"a guess").copies()
    with connect("127.0.0.1", one.server.port, SECRET) as connection:
        manifest = next(iter(SlotFolder(one.folder).sealed().values()))
        order = {"ask": "keep", "node": "../../outside", "rank": 0, "about": manifest.model_dump_json()}
        with pytest.raises((EOFError, OSError)):
            shelf.ask(connection, order)
    assert not (one.folder / "held").exists()


def test_a_node_that_says_nothing_costs_seconds_not_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelf, "CONNECT_DEADLINE_S", 0.2)
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        waiting = [socket.socket() for _ in range(4)]
        for client in waiting:
            client.setblocking(False)
            client.connect_ex(full.getsockname())
        began = time.monotonic()
        with pytest.raises(CheckpointError):
            RemoteShelf("127.0.0.1", full.getsockname()[1], SECRET).copies()
        assert time.monotonic() - began < 5
        for client in waiting:
            client.close()


def test_a_seal_stands_beside_its_copy() -> None:
    assert seal_of(Path("/x/0.a")) == Path("/x/0.a.json")
