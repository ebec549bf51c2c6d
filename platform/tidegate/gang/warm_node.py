"""A node's warm forkserver: it outlives the agents that fork ranks from it, so a node's restart doesn't import torch.

One small actor a node holds it, as a service of the cluster like the node's health agent; it has no GPU and at rest
costs the memory of the imports. Its forkserver ends when it does, and the ranks with it. An agent that finds none, or
one of other code, uses a forkserver of its own.

`multiprocessing` has no public way to use another process's forkserver: `adopt` sets what its client side remembers
(Python 3.11 to 3.13), and `tests/gang/test_rank.py` breaks when that moves.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import ray

import tidegate
from tidegate.arbiter.client import NAMESPACE
from tidegate.gang.rank import PRELOAD
from tidegate.ids import NodeId

DOOR_DEADLINE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """How to reach a forkserver on this node."""

    address: str
    code: str
    """What it has imported."""


class WarmNode:
    """Keeps a forkserver."""

    def __init__(self) -> None:
        open_own()

    def door(self) -> Door:
        """Its address; one that has died is started again."""
        open_own()
        server: Any = forkserver._forkserver
        return Door(address=server._forkserver_address, code=code_of_this_process())


def open_own() -> None:
    """Start this process's own forkserver if it doesn't run. It imports beside us."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(PRELOAD))
    with no_main_module():
        forkserver.ensure_running()


def adopt(door: Door) -> None:
    """Fork from another process's forkserver from now on."""
    server: Any = forkserver._forkserver
    server._forkserver_address = door.address
    # What a child inherits to keep its server alive. This server lives as long as its own actor.
    server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    server.ensure_running = resource_tracker.ensure_running


def use_warm(node: NodeId) -> bool:
    """Adopt the node's warm forkserver; without one open our own. Whether it was warm."""
    try:
        door: Door = ray.get(ray.get_actor(warm_name(node), namespace=NAMESPACE).door.remote(), timeout=DOOR_DEADLINE_S)
    except (ValueError, ray.exceptions.RayError):
        open_own()
        return False
    if door.code != code_of_this_process():
        open_own()
        return False
    adopt(door)
    return True


def start_warm(node: NodeId) -> Any:
    """The node's actor, started if it isn't there. Not restarted by Ray: that would wait for a dead node for ever."""
    return (
        ray.remote(WarmNode)
        .options(
            name=warm_name(node),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            label_selector={"ray.io/node-id": node},
        )
        .remote()
    )


def warm_name(node: NodeId) -> str:
    return f"warm-{node[:12]}"


def code_of_this_process() -> str:
    """Differs where an imported module could differ."""
    package = Path(tidegate.__path__[0])
    newest = max(path.stat().st_mtime_ns for path in package.rglob("*.py"))
    return f"{sys.executable} {sys.version} {package} {newest}"


@contextlib.contextmanager
def no_main_module() -> Iterator[None]:
    """Keep `multiprocessing` from running our `__main__` again in each rank.

    In a Ray worker that is Ray's start script: its imports cost a rank most of a second and are of no use there.
    """
    main = sys.modules["__main__"]
    file = main.__dict__.pop("__file__", None)
    spec, main.__spec__ = main.__spec__, None
    try:
        yield
    finally:
        main.__spec__ = spec
        if file is not None:
            main.__file__ = file
