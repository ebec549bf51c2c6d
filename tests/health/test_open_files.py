"""Files that stay open say what is in them now, whatever happened to them meanwhile."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tidegate.health.sources.open_files import OpenFiles


def open_here(folder: Path) -> int:
    """Of this process: how many files of the folder."""
    links = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
    return sum(os.path.exists(link) and str(folder) in os.readlink(link) for link in links)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "counters").mkdir()
    for name in ("one", "two", "three"):
        (tmp_path / "counters" / name).write_text("1\n")
    return tmp_path / "counters"


@pytest.fixture
def files(folder: Path) -> Iterator[OpenFiles]:
    files = OpenFiles()
    files.follow(str(folder))
    yield files
    files.close(str(folder))


def test_a_file_is_opened_once_and_read_anew_each_time(folder: Path, files: OpenFiles) -> None:
    for value in ("1", "22", "3"):
        (folder / "one").write_text(value + "\n")
        assert files.text(str(folder), "one") == value
        assert open_here(folder) == 1


def test_a_file_that_was_replaced_is_the_new_one(folder: Path, files: OpenFiles) -> None:
    assert files.text(str(folder), "one") == "1"
    (folder / "new").write_text("7\n")
    (folder / "new").rename(folder / "one")
    files.follow(str(folder))
    assert files.text(str(folder), "one") == "7"


def test_a_folder_that_went_and_came_back_is_read_anew_and_nothing_stays_open(folder: Path, files: OpenFiles) -> None:
    assert files.text(str(folder), "one") == "1"
    shutil.rmtree(folder)
    files.follow(str(folder))
    assert open_here(folder) == 0
    with pytest.raises(FileNotFoundError):
        files.text(str(folder), "one")
    folder.mkdir()
    (folder / "one").write_text("5")
    files.follow(str(folder))
    assert files.text(str(folder), "one") == "5"


def test_a_file_that_can_not_be_read_any_more_is_opened_again(folder: Path, files: OpenFiles) -> None:
    """As sysfs does it: the device has gone (ENODEV) and is back under the same name."""
    assert files.text(str(folder), "one") == "1"
    [descriptor] = [
        int(number)
        for number in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{number}") and os.readlink(f"/proc/self/fd/{number}").endswith("/one")
    ]
    writing = os.open(folder / "two", os.O_WRONLY)
    os.dup2(writing, descriptor)  # reading it fails from now on
    os.close(writing)
    assert files.text(str(folder), "one") == "1"


def test_no_more_than_so_many_stay_open(folder: Path) -> None:
    files = OpenFiles(most=2)
    files.follow(str(folder))
    for _ in range(3):
        assert [files.text(str(folder), name) for name in ("one", "two", "three")] == ["1"] * 3
        assert open_here(folder) == 2
    files.close(str(folder))
    assert open_here(folder) == 0
