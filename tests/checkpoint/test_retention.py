"""Which checkpoints may go."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tidegate.checkpoint.retention import Seen, doomed

seen_lists = st.lists(
    st.builds(Seen, step=st.integers(0, 20), generation=st.integers(0, 3), good=st.booleans()),
    unique_by=lambda seen: (seen.step, seen.generation),
)


def steps(seen: tuple[Seen, ...]) -> list[int]:
    return [item.step for item in seen]


def test_the_only_whole_one_stays_while_its_successor_is_in_flight() -> None:
    """C063: keep 1, step 500 whole, step 1000 being written; 500 goes when 1000 is there."""
    whole, flying = Seen(500, 0, good=True), Seen(1000, 0, good=False)
    assert doomed([whole, flying], keep=1) == ()
    assert doomed([whole, Seen(1000, 0, good=True)], keep=1) == (whole,)


def test_the_oldest_go_first() -> None:
    assert steps(doomed([Seen(step, 0, good=True) for step in (60, 20, 80, 40)], keep=2)) == [20, 40]


def test_what_was_torn_goes_once_something_newer_is_good() -> None:
    torn, good = Seen(40, 0, good=False), Seen(40, 1, good=True)
    assert doomed([torn, good, Seen(60, 1, good=False)], keep=3) == (torn,)


def test_a_rotten_one_does_not_crowd_out_a_good_older_one() -> None:
    assert doomed([Seen(30, 1, good=True), Seen(40, 0, good=False)], keep=1) == ()


@given(seen_lists, st.integers(1, 4))
def test_the_newest_good_one_is_never_deleted(seen: list[Seen], keep: int) -> None:
    gone = doomed(seen, keep)
    good = sorted(item for item in seen if item.good)
    assert not set(good[-keep:]) & set(gone)
    assert len([item for item in good if item not in gone]) == min(keep, len(good))
    # The same again where some are pinned: they stay, and the newest good one still does.
    pinned = [replace(item, kept=item.step % 2 == 0) for item in seen]
    left = set(pinned) - set(doomed(pinned, keep))
    assert {item for item in pinned if item.kept} <= left
    assert {replace(item, kept=item.step % 2 == 0) for item in good[-keep:]} <= left
    assert gone == tuple(sorted(gone))
