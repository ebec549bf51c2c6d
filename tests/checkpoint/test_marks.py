"""Pins, and what is marked bad."""

from __future__ import annotations

from pathlib import Path

from folders import write_checkpoint

from tidegate.checkpoint.manifest import MANIFEST
from tidegate.checkpoint.marks import Mark, clear_mark, marks_in, set_mark
from tidegate.checkpoint.restore import newest_good
from tidegate.checkpoint.retention import Seen, doomed


def test_what_is_marked_bad_is_not_restored(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 100)
    newest = write_checkpoint(tmp_path, 200)
    set_mark(newest, Mark.BAD, "a drill\nfound it so")
    found = newest_good(tmp_path)
    assert [str(skipped) for skipped in found.skipped] == ["step-00000200.g0: marked bad: a drill found it so"]
    clear_mark(newest, Mark.BAD)
    clear_mark(newest, Mark.BAD)
    assert newest_good(tmp_path).skipped == ()


def test_an_empty_mark_counts(tmp_path: Path) -> None:
    """C085: somebody touched `pinned`."""
    folder = write_checkpoint(tmp_path, 100)
    (folder / "pinned").touch()
    assert marks_in(folder) == {Mark.PINNED: ""}
    assert (folder / MANIFEST).exists()


def test_kept_ones_stay_and_cost_no_place() -> None:
    """C085: the checkpoint from before the loss rose outlives the policy's."""
    pinned = Seen(100, 0, good=True, kept=True)
    others = [Seen(step, 0, good=True) for step in (200, 300, 400)]
    assert doomed([pinned, *others], keep=2) == (others[0],)
    assert doomed([pinned, others[2]], keep=1) == ()
    torn = Seen(50, 0, good=False, kept=True)
    assert doomed([torn, pinned], keep=1) == ()
