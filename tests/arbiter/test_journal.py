from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from story import NODES, Story, ask

from tidegate.arbiter.book import ENDED_KEPT_S
from tidegate.arbiter.holdings import holdings
from tidegate.arbiter.journal import FileJournal, is_about, read_moves
from tidegate.arbiter.messages import GangPhase, JournalEntry, ReplicaReport
from tidegate.arbiter.states import ClaimState
from tidegate.ids import pool_name


def whole_flip(path: Path, keep_every_lines: int = 2000, run: str = "run") -> Story:
    story = Story(journal=FileJournal(path, keep_every_lines))  # type: ignore[arg-type]
    story.tick(10)
    claim = story.file(ask(run))
    story.until(claim, ClaimState.GRANTED)
    story.phases[claim] = GangPhase.FINISHED
    story.until(claim, ClaimState.DONE)
    story.loop.publish("images", "/exports/1")
    return story


def test_reading_the_file_again_gives_the_same_book(tmp_path: Path) -> None:
    story = whole_flip(tmp_path / "journal.jsonl")
    assert FileJournal(tmp_path / "journal.jsonl").book() == story.loop.book


def test_a_torn_last_line_is_dropped_and_the_next_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    story = whole_flip(path)
    with path.open("a") as file:
        file.write('{"at_s": 1, "kind": "adv')
    again = FileJournal(path)
    assert again.book() == story.loop.book
    again.note(JournalEntry(at_s=2.0, kind="note", subjects=("run",), reason="after the crash"))
    assert [entry.reason for entry in again.about("run")][-1] == "after the crash"


def test_a_restart_reads_the_kept_book_and_the_lines_behind_it(tmp_path: Path) -> None:
    story = whole_flip(tmp_path / "journal.jsonl", keep_every_lines=20)
    again = FileJournal(tmp_path / "journal.jsonl")
    assert again.book() == story.loop.book
    # That it was read, and not only the journal, is seen by a mark in it that no move has made.
    kept = json.loads(again.kept_path.read_text())
    assert 0 < kept["journal_bytes"] < again.path.stat().st_size
    kept["book"]["weights"]["marked"] = {"version": 7, "uri": "/exports/7"}
    again.kept_path.write_text(json.dumps(kept))
    marked = FileJournal(again.path).book()
    assert marked.weights["marked"].version == 7
    assert replace(marked, weights=story.loop.book.weights) == story.loop.book


@pytest.mark.parametrize(
    "spoil",
    [
        lambda kept: kept[: len(kept) // 2],
        lambda kept: "[]",
        lambda kept: json.dumps({**json.loads(kept), "seal": 1}),
        lambda kept: json.dumps({**json.loads(kept), "journal_bytes": 10**9}),
        lambda kept: json.dumps({**json.loads(kept), "book": {"claims": {}}}),
        lambda kept: kept.replace('"running"', '"strolling"').replace('"done"', '"strolling"'),
    ],
    ids=["torn", "no object", "of another journal", "of a longer journal", "of another version", "unreadable"],
)
def test_a_kept_book_that_is_no_use_is_passed_over(tmp_path: Path, spoil: Callable[[str], str]) -> None:
    story = whole_flip(tmp_path / "journal.jsonl", keep_every_lines=1)
    again = FileJournal(tmp_path / "journal.jsonl")
    before = again.kept_path.read_text()
    again.kept_path.write_text(spoil(before))
    assert again.kept_path.read_text() != before
    assert again.book() == story.loop.book


def test_a_kept_book_is_not_taken_for_another_journals(tmp_path: Path) -> None:
    """As where somebody has put a journal back from a backup, or has begun a new one."""
    one = whole_flip(tmp_path / "one" / "journal.jsonl", keep_every_lines=1)
    other = whole_flip(tmp_path / "other" / "journal.jsonl", run="another")
    assert (tmp_path / "other" / "journal.jsonl").stat().st_size > (tmp_path / "one" / "journal.jsonl").stat().st_size
    shutil.copy(tmp_path / "one" / "book.json", tmp_path / "other")
    assert one.loop.book != other.loop.book
    assert FileJournal(tmp_path / "other" / "journal.jsonl").book() == other.loop.book


def test_a_claim_is_forgotten_a_week_after_its_end_but_for_its_name(tmp_path: Path) -> None:
    story = whole_flip(tmp_path / "journal.jsonl")
    story.clock.advance(ENDED_KEPT_S + 1)
    other = story.file(ask("other"))
    assert set(story.loop.book.claims) == {other}
    again = story.file(ask())
    assert again == "run.2"
    assert FileJournal(tmp_path / "journal.jsonl").book() == story.loop.book
    assert story.journal.about("run")
    (held, *_) = holdings(read_moves(tmp_path / "journal.jsonl"), story.clock.now_s())
    assert held.run == "run"


def test_why_finds_a_claim_a_node_and_a_pool(tmp_path: Path) -> None:
    whole_flip(tmp_path / "journal.jsonl")
    journal = FileJournal(tmp_path / "journal.jsonl")
    states = [entry.data["to"] for entry in journal.about("run") if entry.kind == "advance"]
    assert states == ["proving", "draining", "granted", "returning", "done"]
    assert {entry.kind for entry in journal.about("aaaaaa")} >= {"set_target", "create_group"}


def test_why_of_a_replica_tells_of_its_pools_targets_too(tmp_path: Path) -> None:
    story = whole_flip(tmp_path / "journal.jsonl")
    pool = pool_name(NODES[0])
    for name, at in (("abcd1234", pool), ("wxyz1234", pool), ("other123", pool_name(NODES[1]))):
        story.loop.report_replica("images", ReplicaReport(replica=name, at_s=1.0, serving_version=0, pool=at))
    journal = FileJournal(tmp_path / "journal.jsonl")
    told = journal.about("abcd1234")
    assert [entry.subjects for entry in told if entry.kind == "replica"] == [("images", "abcd1234", pool)]
    targets = [entry.data["pool"] for entry in told if entry.kind == "set_target"]
    assert targets
    assert set(targets) == {pool}
    assert {entry.kind for entry in journal.about("images")} == {"publish", "replica", "roll"}, (
        "an application is no replica"
    )


def test_what_a_person_types() -> None:
    assert is_about("digits", "digits")
    assert not is_about("digits.2", "dig")
    assert is_about("a" * 56, "aaaaaa")
    assert is_about("pool-aaaaaaaaaaaa", "a" * 56)
    assert not is_about("b" * 56, "aaaaaa")
