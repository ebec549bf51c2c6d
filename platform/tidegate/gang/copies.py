"""A node's copies of checkpoints in memory, as its agent keeps them: lent to all ranks of the run, sent to a buddy."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from tidegate.checkpoint.folders import NODE, SHARED_MEMORY, SlotFolder, folder_of, remove_leftovers
from tidegate.checkpoint.shelf import Buddy, ShelfServer
from tidegate.gang.buddies import buddies
from tidegate.gang.plan import Plan
from tidegate.ids import NodeId

log = logging.getLogger(__name__)


class NodeCopies:
    """They outlive the agent: its successor lends them on."""

    def __init__(self, node: NodeId, run: str, run_dir: Path, secret: str) -> None:
        self._node = node
        self._folder = SlotFolder(folder_of(run, run_dir, {NODE: node}))
        self._folder.hold()
        for left in remove_leftovers(SHARED_MEMORY, time.time(), spare=self._folder.path):
            log.warning("removed what a dead run left in memory: %s", left)
        self._server = ShelfServer(self._folder.path, secret.encode())
        self._buddy = Buddy(self._folder.path, node, secret.encode())

    @property
    def port(self) -> int:
        return self._server.port

    def follow(self, plan: Plan) -> None:
        """Send to the buddy that this generation gives us."""
        shelves = {shelf.node: shelf for shelf in plan.shelves}
        mine = buddies({node: shelf.domain for node, shelf in shelves.items()}).get(self._node)
        if mine is None:
            self._buddy.send_to_nobody()
        else:
            self._buddy.send_to(shelves[mine].address, shelves[mine].port)

    def forget(self) -> None:
        """The run has ended, or left this node."""
        self.close()
        self._folder.remove()

    def close(self) -> None:
        self._buddy.close()
        self._server.close()
        self._folder.let_go()
