from __future__ import annotations

from pathlib import Path

from story import NODES, Story, ask

from tidegate.arbiter.journal import FileJournal, is_about
from tidegate.arbiter.messages import GangPhase, JournalEntry, ReplicaReport
from tidegate.arbiter.states import ClaimState
from tidegate.ids import pool_name


def whole_flip(path: Path) -> Story:
    story = Story(journal=FileJournal(path))  # type: ignore[arg-type]
    story.tick(10)
    claim = story.file(ask())
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
    assert {entry.kind for entry in journal.about("images")} == {"publish", "replica"}, "an application is no replica"


def test_what_a_person_types() -> None:
    assert is_about("digits", "digits")
    assert not is_about("digits.2", "dig")
    assert is_about("a" * 56, "aaaaaa")
    assert is_about("pool-aaaaaaaaaaaa", "a" * 56)
    assert not is_about("b" * 56, "aaaaaa")
