"""Sources of all kinds to shards, in steps that can be killed."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import boto3
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from moto.server import ThreadedMotoServer
from PIL import Image

from captioned import captioned_images
from tidegate.data.buckets import Size
from tidegate.data.dataset import Dataset
from tidegate.data.layout import Index, read_index
from tidegate.data.preparation import Preparation, Settings
from tidegate.data.sources import Split
from tidegate.data.storage import Folder
from tidegate.errors import DataError


def run(preparation: Preparation, *, parts: int | None = None, shards: int | None = None) -> Index | None:
    """What the job does, in this process; killed after so many parts or shards."""
    for number, split in preparation.begin().items():
        for name, part in preparation.read(number, split):
            if parts == 0:
                return None
            parts = None if parts is None else parts - 1
            preparation.keep(name, part)
    for plan in preparation.plan():
        if shards == 0:
            return None
        shards = None if shards is None else shards - 1
        preparation.write_shard(plan)
    return preparation.finish()


def settings(source: object, out: object, **changes: object) -> Settings:
    values = {"seed": 3, "rows_per_shard": 7, "rows_per_part": 4, "multiple": 8}
    return Settings.model_validate({**values, "source": str(source), "out": str(out), **changes})


def content(folder: Path) -> dict[str, bytes]:
    """All files, hidden ones too."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def colourful(folder: Path, count: int) -> Path:
    """Photographs, more or less: JPEG and PNG of many shapes, each with one colour, and their captions."""
    folder.mkdir(parents=True)
    lines = []
    for number in range(count):
        shape = ((40, 40), (60, 30), (32, 64))[number % 3]
        ending = ("jpg", "png")[number % 2]
        name = f"{number:03d}.{ending}"
        Image.new("RGB", shape, (10 * number, 0, 255 - 10 * number)).save(folder / name)
        lines.append(json.dumps({"file_name": name, "text": f"number {number}", "text_short": str(number)}))
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return colourful(tmp_path_factory.mktemp("photos") / "images", 24)


@pytest.fixture(scope="module")
def whole(photos: Path) -> Path:
    """What comes out when nothing happens."""
    out = photos.parent / "whole"
    assert run(Preparation(settings(photos, out, resolution=32))) is not None
    return out


def test_images_are_cut_to_their_bucket_and_captions_stay_theirs(whole: Path) -> None:
    index = read_index(Folder.at(whole))
    assert index.rows == 24
    assert index.rejected_rows == 0
    assert sum(index.buckets.values()) == 24
    assert index.buckets[Size(32, 32)] == 8
    assert len(index.buckets) == 3
    data = Dataset(whole, width=32, height=32, channels=3, buckets=True)
    seen = []
    for sample in range(24):
        rows = data.rows(np.array([sample]))
        number = int(rows.captions[0].short)
        assert rows.captions[0].long == f"number {number}"
        # JPEG moves a colour a little.
        assert np.abs(rows.pixels[0].reshape(-1, 3).astype(int) - (10 * number, 0, 255 - 10 * number)).max() <= 3
        shape = ((40, 40), (60, 30), (32, 64))[number % 3]
        assert (rows.size.aspect > 1) == (shape[0] > shape[1])
        seen.append(number)
    assert sorted(seen) == list(range(24))
    assert seen[:8] != sorted(seen[:8])


@pytest.mark.parametrize("killed", [{"parts": 0}, {"parts": 2}, {"parts": 3}, {"shards": 0}, {"shards": 3}])
def test_killed_and_started_again_is_the_same_and_makes_nothing_twice(
    photos: Path, tmp_path: Path, killed: dict[str, int]
) -> None:
    """Two tars of three and four parts: one is killed between two parts of a tar."""
    source = as_tar(photos, tmp_path / "source")
    alone, out = settings(source, tmp_path / "alone", resolution=32), settings(source, tmp_path / "out", resolution=32)
    run(Preparation(alone))
    assert run(Preparation(out), **killed) is None
    assert not (tmp_path / "out" / "index.json").exists()
    before = {
        path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*") if path.suffix in (".arrow", ".parquet")
    }
    assert len(before) == killed.get("parts", 7 + killed.get("shards", 0))
    made: list[str] = []
    tars: list[int] = []

    class Watched(Preparation):
        def read(self, number: int, split: Split) -> Iterator[tuple[str, bytes]]:
            tars.append(number)
            return super().read(number, split)

        def keep(self, name: str, part: bytes) -> None:
            made.append(name)
            super().keep(name, part)

    assert run(Watched(out)) is not None
    finished = 2 if "shards" in killed else killed["parts"] // 3
    assert tars == [0, 1][finished:], "a tar whose parts are all there is not read again"
    assert not {path.name for path in before} & set(made)
    assert len(made) + len([path for path in before if path.suffix == ".arrow"]) == 7
    kept = [path for path in before if path.exists()]
    assert len(kept) == killed.get("shards", 0)
    assert {path: path.stat().st_mtime_ns for path in kept} == {path: before[path] for path in kept}
    assert content(tmp_path / "out") == content(tmp_path / "alone")


def test_the_size_of_parts_changes_nothing_but_blocks_of_arrow(photos: Path, whole: Path, tmp_path: Path) -> None:
    """Which process read what: the same rows in the same order."""
    run(Preparation(settings(photos, tmp_path / "out", resolution=32, rows_per_part=100)))
    ours, theirs = (sorted(path.glob("*.parquet")) for path in (tmp_path / "out", whole))
    assert [pq.read_table(path) for path in ours] == [pq.read_table(path) for path in theirs]


def test_another_seed_is_another_order(photos: Path, whole: Path, tmp_path: Path) -> None:
    run(Preparation(settings(photos, tmp_path / "out", resolution=32, seed=4)))
    ours, theirs = (
        [row for path in sorted(folder.glob("*.parquet")) for row in pq.read_table(path)["text"].to_pylist()]
        for folder in (tmp_path / "out", whole)
    )
    assert ours != theirs
    assert sorted(ours) == sorted(theirs)


def as_parquet(photos: Path, folder: Path) -> Path:
    folder.mkdir()
    rows = [json.loads(line) for line in (photos / "metadata.jsonl").read_text().splitlines()]
    for number, part in enumerate((rows[:10], rows[10:])):
        images = [{"bytes": (photos / row["file_name"]).read_bytes(), "path": row["file_name"]} for row in part]
        texts = {name: [row[name] for row in part] for name in ("text", "text_short")}
        pq.write_table(pa.table({"image": images, **texts}), folder / f"{number}.parquet")
    return folder


def as_tar(photos: Path, folder: Path) -> Path:
    folder.mkdir()
    rows = [json.loads(line) for line in (photos / "metadata.jsonl").read_text().splitlines()]
    for number, part in enumerate((rows[:10], rows[10:])):
        with tarfile.open(folder / f"{number}.tar", "w") as tar:
            for row in part:
                stem = row["file_name"].split(".")[0]
                tar.add(photos / row["file_name"], row["file_name"])
                if number:
                    add(tar, f"{stem}.json", json.dumps(row).encode())
                else:
                    add(tar, f"{stem}.txt", row["text"].encode())
                    add(tar, f"{stem}.short.txt", row["text_short"].encode())
    return folder


def add(tar: tarfile.TarFile, name: str, raw: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(raw)
    tar.addfile(info, io.BytesIO(raw))


@pytest.mark.parametrize("source", [as_parquet, as_tar])
def test_parquet_and_tars_hold_the_same_samples(photos: Path, whole: Path, tmp_path: Path, source: object) -> None:
    assert callable(source)
    run(Preparation(settings(source(photos, tmp_path / "source"), tmp_path / "out", resolution=32)))
    assert samples(tmp_path / "out") == samples(whole)


def samples(folder: Path) -> list[tuple[bytes, str, str]]:
    found = [row for path in sorted(folder.glob("*.parquet")) for row in pq.read_table(path).to_pylist()]
    return sorted((row["image"]["bytes"], row["text"], row["text_short"]) for row in found)


def test_whatever_is_bad_is_listed_with_its_reason(photos: Path, tmp_path: Path) -> None:
    source = as_tar(photos, tmp_path / "source")
    with tarfile.open(source / "2.tar", "w") as tar:
        add(tar, "a.txt", b"no image")
        add(tar, "b.png", b"not an image")
        add(tar, "b.txt", b"a caption")
        add(tar, "c.jpg", (photos / "000.jpg").read_bytes())
        add(tar, "d.jpg", (photos / "000.jpg").read_bytes())
        add(tar, "d.json", b"[]")
        out = io.BytesIO()
        Image.new("RGB", (90, 9)).save(out, "PNG")
        add(tar, "e.png", out.getvalue())
        add(tar, "e.txt", b"a long one")
        out = io.BytesIO()
        Image.new("RGB", (9, 9)).save(out, "PNG")
        add(tar, "f.png", out.getvalue())
        add(tar, "f.txt", b"a small one")
    torn = source / "1.tar"
    torn.write_bytes(torn.read_bytes()[:2000])
    (source / "3.parquet").write_bytes(b"PAR1 no")
    index = run(Preparation(settings(source, tmp_path / "out", resolution=32, side_min=9)))
    assert index is not None
    why = {
        row["source"]: row["why"]
        for row in map(json.loads, (tmp_path / "out" / "rejected.jsonl").read_text().splitlines())
    }
    assert why["2.tar:a"] == "no image: has .txt"
    assert why["2.tar:b"] == "cannot identify image file"
    assert why["2.tar:c"] == "empty caption"
    assert why["2.tar:d"].startswith("its .json: ")
    assert why["2.tar:e"] == "too long: 90x9, one side may be 4 times the other"
    assert why["1.tar"].startswith("the file is damaged: ")
    assert "3.parquet" in why
    assert index.rejected_rows == len(why) == 7
    assert index.rows >= 11


def test_columns_that_are_not_there_are_named(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    pq.write_table(pa.table({"jpg": [b""], "caption": ["a"]}), source / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: has columns jpg, caption\nhint: needs `image` and `text`"):
        run(Preparation(settings(source, tmp_path / "out")))


def test_what_is_there_is_not_mixed_with_other_settings(photos: Path, whole: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is prepared already\nhint: remove it"):
        Preparation(settings(photos, whole, resolution=32)).begin()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a.txt").write_text("")
    with pytest.raises(DataError, match="exists and is not empty\nhint: remove it"):
        Preparation(settings(photos, tmp_path / "full")).begin()
    run(Preparation(settings(photos, tmp_path / "out")), parts=1)
    with pytest.raises(DataError, match="was begun with other settings\nhint: remove it"):
        Preparation(settings(photos, tmp_path / "out", seed=1)).begin()


def test_nothing_of_use_names_the_first(tmp_path: Path) -> None:
    images = captioned_images(tmp_path / "images", 2)
    with pytest.raises(DataError, match=r"no usable image, 2 rejected; first: 000\.png: too small: 4x4"):
        run(Preparation(settings(images, tmp_path / "out", side_min=5)))


@pytest.fixture(scope="module")
def store() -> Iterator[str]:
    """moto's real server: its address."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


def test_s3_holds_source_and_shards(
    photos: Path, whole: Path, tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bytes as on disk, and a rank reads them there; killed in between."""
    for name, value in {
        "AWS_ENDPOINT_URL": store,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        # Else a client looks for a machine of Amazon's first.
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3")
    client.create_bucket(Bucket="photos")
    for path in photos.iterdir():
        client.upload_file(str(path), "photos", f"source/{path.name}")
    ours = settings("s3://photos/source", "s3://photos/out", resolution=32)
    assert run(Preparation(ours), parts=3) is None
    assert run(Preparation(ours), shards=2) is None
    index = run(Preparation(ours))
    assert index is not None
    assert index.shards == read_index(Folder.at(whole)).shards
    keys = {one["Key"] for one in client.list_objects_v2(Bucket="photos", Prefix="out/")["Contents"]}
    assert {key.rpartition("/")[2] for key in keys if not key.endswith("/")} == set(content(whole))
    there, here = (
        Dataset(place, width=32, height=32, channels=3, buckets=True) for place in ("s3://photos/out", whole)
    )
    for step in range(4):
        assert (there.rows(there.ids(0, step, 5)).pixels == here.rows(here.ids(0, step, 5)).pixels).all()
    with pytest.raises(DataError, match="No such file or directory\nhint: prepare it"):
        Dataset("s3://photos/nothing", width=32, height=32, channels=3)
