"""A run's checkpoints on their way to its object store. Rank 0 sends; when it is to stop for it, all ranks do."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import torch.distributed as dist

from tidegate.checkpoint.address import parse_address
from tidegate.checkpoint.courier import Courier
from tidegate.checkpoint.errand import Delivered, Errand
from tidegate.checkpoint.manifest import folder_name
from tidegate.checkpoint.marks import Mark
from tidegate.checkpoint.places import marked
from tidegate.checkpoint.restore import Restored
from tidegate.checkpoint.store_file import StoreFile, write_store_file
from tidegate.checkpoint.tiers import Disk, Tier
from tidegate.errors import CheckpointError
from tidegate.train.config import CheckpointSpec
from tidegate.train.progress import Phase, Progress
from tidegate.train.records import Records

LAST_WAIT_S = 1800.0
"""A run that has ended waits so long for its last checkpoint to arrive. It holds its GPUs meanwhile."""


def store_tier(spec: CheckpointSpec, run: str) -> tuple[Tier, ...]:
    """The store as a tier to restore from; none where the run has none."""
    if spec.store is None:
        return ()
    # botocore is only imported by runs that have a store.
    from tidegate.checkpoint.object_store import ObjectStore, Patience

    patience = Patience(attempts=spec.store_attempts)
    return (ObjectStore(parse_address(spec.store), spec.store_endpoint, run=run, patience=patience),)


def check_store(spec: CheckpointSpec, run: str, restored: Restored, group: dist.ProcessGroup) -> None:
    """Before the first step of a run that no checkpoint was found for: whether its store can take what it will be sent,
    and really has nothing. To be called by all ranks.

    Raises:
        CheckpointError: it cannot, or may have; on every rank. Names the setting.
    """
    if spec.store is None or restored.manifest is not None:
        return
    problem: list[str | None] = [None]
    if dist.get_rank(group) == 0:
        from tidegate.checkpoint.object_store import ObjectStore, Patience, check

        patience = Patience(attempts=spec.store_attempts)
        try:
            check(ObjectStore(parse_address(spec.store), spec.store_endpoint, patience=patience), run)
        except CheckpointError as error:
            problem = [str(error)]
    dist.broadcast_object_list(problem, group_src=0, group=group)
    if problem[0] is not None:
        raise CheckpointError(problem[0])
    unread = next((one for one in restored.skipped if one.tier == "s3" and not one.unfinished), None)
    if unread is not None:
        # To begin anew beside a good checkpoint would be a run's whole work twice.
        raise CheckpointError(
            f"checkpoint.store: {spec.store}: what is there could not be restored, and nothing else is: {unread}\n"
            "hint: submit again; if `tidegate checkpoint verify` says that it is bad, prune it or give another prefix"
        )


class Shipping:
    """Does nothing in a run without a store, and on other ranks than 0."""

    def __init__(
        self, spec: CheckpointSpec, run: str, run_dir: Path, records: Records, *, rank: int, generation: int
    ) -> None:
        self._spec, self._records, self._generation = spec, records, generation
        self._courier: Courier | None = None
        self._failures = 0
        """In a row."""
        self._why = ""
        """The newest of them."""
        self._newest = ""
        """Name of the newest commit."""
        self._offered = ""
        self.gave_up: str | None = None
        """Why the run is to save and stop. Rank 0 alone knows."""
        self._run, self._run_dir, self._sends = run, run_dir, spec.store is not None and rank == 0

    def __enter__(self) -> Self:
        """Begin with what an earlier generation has left unsent."""
        if self._sends:
            assert self._spec.store is not None
            write_store_file(self._run_dir, StoreFile(store=self._spec.store, endpoint=self._spec.store_endpoint))
            errand = Errand(
                checkpoints=str(self._run_dir / "checkpoints"),
                store=self._spec.store,
                endpoint=self._spec.store_endpoint,
                run=self._run,
                generation=self._generation,
                keep=self._spec.store_keep,
                attempts=self._spec.store_attempts,
            )
            self._courier = Courier(errand)
            for candidate in marked(Disk(self._run_dir / "checkpoints"), Mark.SENDING)[-1:]:
                self._courier.offer(candidate.name)
        return self

    def __exit__(self, *raised: object) -> None:
        """What is under way goes on with the next start."""
        if self._courier is not None:
            self._courier.close()

    def committed(self, step: int) -> None:
        """A checkpoint of `step` is on disk. It is sent if that is due."""
        if self._courier is not None:
            self._newest = folder_name(step, self._generation)
            if step % (self._spec.store_every_steps or 1) == 0:
                self._offer()

    def poll(self) -> None:
        """Say how sendings have ended. Costs microseconds."""
        if self._courier is not None:
            for delivered in self._courier.poll():
                self._settle(delivered)

    def last(self, progress: Progress, group: dist.ProcessGroup, *, wait: bool) -> str | None:
        """Send the newest checkpoint if it isn't yet, and wait for it; why it is not in the store, the same on every
        rank. To be called by all ranks, who show meanwhile that they live. `wait` false: only why the run stopped."""
        if self._spec.store is None:
            return None
        if self._courier is not None and self.gave_up is None and self._newest and self._newest != self._offered:
            self._offer()
        waited = 0.0
        answer: list[str | None] = [None]
        while answer[0] is None:
            progress.phase(Phase.SAVING)
            if self._courier is not None:
                for delivered in self._courier.wait(1.0 if wait else 0.0):
                    self._settle(delivered)
                waited += 1.0
                answer = [self._end(waited) if wait else self.gave_up or ""]
            dist.broadcast_object_list(answer, group_src=0, group=group)
        return answer[0] or None

    def _end(self, waited_s: float) -> str | None:
        """None: not yet. Empty: all is well."""
        assert self._courier is not None
        if self.gave_up is not None:
            return self.gave_up
        if not self._courier.under_way:
            return f"the last checkpoint is on disk, but not in the store: {self._why}" if self._failures else ""
        if waited_s >= LAST_WAIT_S:
            # It is marked: the next start of the run goes on with it.
            self._records.event("upload_left", checkpoint=self._courier.under_way[-1])
            return ""
        return None

    def _offer(self) -> None:
        assert self._courier is not None
        self._courier.offer(self._newest)
        self._offered = self._newest

    def _settle(self, delivered: Delivered) -> None:
        if delivered.error is None:
            self._failures = 0
            took = {"seconds": round(delivered.took_s, 3), "bytes": delivered.sent_bytes}
            there = {"there_bytes": delivered.there_bytes, "removed": list(delivered.removed)}
            self._records.event("uploaded", checkpoint=delivered.name, **took, **there)
            if delivered.not_removed is not None:
                self._records.event("store_not_pruned", reason=delivered.not_removed)
            return
        self._failures += 1
        self._why = delivered.error
        name = {"checkpoint": delivered.name, "in_a_row": self._failures}
        self._records.event("upload_failed", **name, reason=delivered.error)
        if self._failures > self._spec.store_failures_max:
            self.gave_up = (
                f"{self._failures} checkpoints in a row did not reach {self._spec.store}: {delivered.error}\n"
                "hint: they are on disk; put the store right and submit again, or raise checkpoint.store_failures_max"
            )
