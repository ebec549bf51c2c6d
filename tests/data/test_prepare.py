"""From a folder of images to shards."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from captioned import captioned_images
from tidegate.data.buckets import Size
from tidegate.data.layout import read_index
from tidegate.data.prepare import prepare
from tidegate.data.storage import Folder
from tidegate.errors import DataError


def captions(folder: Path) -> list[tuple[str, str]]:
    rows = []
    for shard in read_index(Folder.at(folder)).shards:
        table = pq.read_table(folder / shard.name)
        assert table.num_rows == shard.rows
        rows += [(row["image"]["path"], row["text"]) for row in table.to_pylist()]
    return rows


def listed(folder: Path) -> list[tuple[str, str]]:
    lines = (folder / "metadata.jsonl").read_text().splitlines()
    return [(row["file_name"], row["text"]) for row in map(json.loads, lines)]


def test_all_rows_once_in_an_order_that_the_seed_decides(tmp_path: Path) -> None:
    images = captioned_images(tmp_path / "images", 25)
    index = prepare(images, tmp_path / "a", seed=3, rows_per_shard=10)
    prepare(images, tmp_path / "b", seed=3, rows_per_shard=10)
    prepare(images, tmp_path / "c", seed=4, rows_per_shard=10)
    assert [shard.rows for shard in index.shards] == [10, 10, 5]
    assert captions(tmp_path / "a") == captions(tmp_path / "b") != captions(tmp_path / "c")
    assert sorted(captions(tmp_path / "a")) == sorted(listed(images)) != captions(tmp_path / "a")
    assert index.buckets == {Size(4, 4): 25}


def test_shards_have_the_layout_of_datasets(tmp_path: Path) -> None:
    images = captioned_images(tmp_path / "images", 3)
    prepare(images, tmp_path / "out", seed=0, rows_per_shard=10)
    schema = pq.read_schema(tmp_path / "out" / "train-00000-of-00001.parquet")
    features = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
    text = {"dtype": "string", "_type": "Value"}
    assert features == {"image": {"_type": "Image"}, "text": text, "text_short": text}
    row = pq.read_table(tmp_path / "out" / "train-00000-of-00001.parquet").to_pylist()[0]
    assert row["image"]["bytes"] == (images / row["image"]["path"]).read_bytes()


def test_bad_images_are_listed_and_cost_nobody_else(tmp_path: Path) -> None:
    images = captioned_images(tmp_path / "images", 6)
    (images / "000.png").write_bytes((images / "000.png").read_bytes()[:-24])  # opens, and does not decode
    (images / "001.png").unlink()
    (images / "002.png").write_bytes(b"")
    with (images / "metadata.jsonl").open("a") as file:
        file.write('{"file_name": "../secret.png", "text": "no"}\nnot json\n{"file_name": "003.png"}\n')
    index = prepare(images, tmp_path / "out", seed=0, rows_per_shard=10)
    assert (index.rows, index.rejected_rows) == (3, 6)
    listed_rows = (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()
    why = {row["source"]: row["why"] for row in map(json.loads, listed_rows)}
    assert {row.source: row.why for row in index.rejected_first} == why
    assert why["001.png"] == "No such file or directory"
    assert why["../secret.png"] == "lies outside the folder"
    assert why["metadata.jsonl:9"] == "no 'text'"
    assert {"000.png", "002.png", "metadata.jsonl:8"} < set(why)
    assert sorted(captions(tmp_path / "out")) == listed_good(images)


def listed_good(images: Path) -> list[tuple[str, str]]:
    lines = (images / "metadata.jsonl").read_text().splitlines()[3:6]
    return sorted((row["file_name"], row["text"]) for row in map(json.loads, lines))


@pytest.mark.parametrize(
    ("left", "says"),
    [
        ("nothing", "no such folder, or nothing in it"),
        ("folder", "no such folder, or nothing in it"),
        ("empty list", "metadata.jsonl: empty"),
    ],
)
def test_nothing_to_prepare_names_the_fix(tmp_path: Path, left: str, says: str) -> None:
    images = tmp_path / "images"
    if left != "nothing":
        images.mkdir()
    if left == "empty list":
        (images / "metadata.jsonl").write_text("\n")
    with pytest.raises(DataError, match=rf"{says}\nhint: "):
        prepare(images, tmp_path / "out", seed=0, rows_per_shard=10)
    assert not (tmp_path / "out").exists()


def test_only_bad_images_leave_nothing_behind(tmp_path: Path) -> None:
    images = captioned_images(tmp_path / "images", 2)
    for image in images.glob("*.png"):
        image.write_bytes(b"no")
    with pytest.raises(DataError, match="no usable image, 2 rejected"):
        prepare(images, tmp_path / "out", seed=0, rows_per_shard=10)
    assert [path.name for path in tmp_path.iterdir()] == ["images"]


def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    images = captioned_images(tmp_path / "images", 2)
    prepare(images, tmp_path / "out", seed=0, rows_per_shard=10)
    before = (tmp_path / "out" / "index.json").read_bytes()
    with pytest.raises(DataError, match="exists and is not empty\nhint: "):
        prepare(images, tmp_path / "out", seed=1, rows_per_shard=10)
    assert (tmp_path / "out" / "index.json").read_bytes() == before


def test_the_job(tmp_path: Path) -> None:
    images = captioned_images(tmp_path / "images", 3)
    (images / "001.png").write_bytes(b"no")
    job = Path(__file__).parents[2] / "jobs" / "prepare_data.py"
    command = [sys.executable, str(job), "--images", str(images), "--out", str(tmp_path / "out"), "--seed", "5"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "2 images (2 of 4x4) in 1 shards, 1 rejected" in done.stdout
    assert "rejected: 001.png: " in done.stdout
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 1
    assert "hint: remove it" in again.stderr


def test_captions_long_and_short_from_files_beside_the_images(tmp_path: Path) -> None:
    images = captioned_images(tmp_path / "images", 3)
    (images / "metadata.jsonl").unlink()
    (images / "000.png").rename(images / "deep.png")
    (images / "deep.txt").write_text("a long caption\n")
    (images / "deep.short.txt").write_text("short")
    (images / "001.txt").write_text(" \n")
    index = prepare(images, tmp_path / "out", seed=0, rows_per_shard=10)
    [row] = pq.read_table(tmp_path / "out" / "train-00000-of-00001.parquet").to_pylist()
    assert (row["text"], row["text_short"]) == ("a long caption", "short")
    why = {row.source: row.why for row in index.rejected_first}
    assert why == {"001.png": "empty caption", "002.png": "no caption: no metadata.jsonl, and no 002.txt"}
