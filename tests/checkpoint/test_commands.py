"""`tidegate checkpoint`, on real folders, without any cluster."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from folders import about, harm, parts_of, tensors, write_checkpoint
from typer.testing import CliRunner

from tidegate.checkpoint.folders import folder_of
from tidegate.checkpoint.manifest import MANIFEST
from tidegate.checkpoint.object_store import ObjectStore
from tidegate.checkpoint.places import disk_of
from tidegate.checkpoint.slots import Slot
from tidegate.checkpoint.store_file import StoreFile, write_store_file
from tidegate.checkpoint.tiers import Candidate
from tidegate.checkpoint.upload import send
from tidegate.cli.main import app
from tidegate.testing.faulty_proxy import Fault, FaultKind, FaultyProxy


def command(*words: object) -> Result:
    return CliRunner().invoke(app, ["checkpoint", *map(str, words)])


def listed(run: Path) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads(command("list", run, "--json").stdout)}


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_a_list_says_what_is_good_and_why_the_rest_is_not(tmp_path: Path) -> None:
    """C050, C052, C053: no metadata; a part of it missing; empty files after a loss of power."""
    kept = tmp_path / "checkpoints"
    write_checkpoint(kept, 100)
    (write_checkpoint(kept, 200) / MANIFEST).unlink()
    next(write_checkpoint(kept, 300).glob("shard-00002-*")).unlink()
    for file in write_checkpoint(kept, 400, generation=2).iterdir():
        file.write_bytes(b"")
    found = listed(tmp_path)
    assert list(found) == ["step-00000400.g2", "step-00000300.g0", "step-00000200.g0", "step-00000100.g0"]
    assert [row["state"] for row in found.values()] == ["bad", "bad", "unfinished", "good"]
    assert found["step-00000300.g0"]["why"].startswith("shard-00002-model-00001-of-00001.safetensors: No such file")
    assert found["step-00000200.g0"]["why"] == "never committed: no manifest"
    assert found["step-00000100.g0"]["bytes"] == sum(
        path.stat().st_size for path in (kept / "step-00000100.g0").glob("s*")
    )
    table = command("list", tmp_path)
    assert table.exit_code == 0
    assert "unfinished" in table.stdout


def test_verify_reads_every_byte(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoints", 100)
    folder = write_checkpoint(tmp_path / "checkpoints", 200)
    assert command("verify", tmp_path).exit_code == 0
    harm(folder, "flip")
    assert listed(tmp_path)["step-00000200.g0"]["state"] == "good", "list reads no content"
    done = command("verify", tmp_path)
    assert done.exit_code == 1
    assert "disk: step-00000200.g0: bad, shard-00002-model-00001-of-00001.safetensors: content differs" in done.stdout
    assert "disk: step-00000100.g0: good" in done.stdout


def test_verify_minds_no_save_in_flight_but_wants_one_good(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoints", 100)
    (write_checkpoint(tmp_path / "checkpoints", 200) / MANIFEST).unlink()
    assert command("verify", tmp_path).exit_code == 0
    (tmp_path / "checkpoints" / "step-00000100.g0" / MANIFEST).unlink()
    assert command("verify", tmp_path).exit_code == 1


def test_prune_keeps_the_last_good_one_and_what_is_pinned(tmp_path: Path) -> None:
    """The newest looks whole and is rotten: it does not count as the last good one."""
    for step in (100, 200, 300, 400):
        folder = write_checkpoint(tmp_path / "checkpoints", step)
    harm(folder, "flip")
    assert command("pin", tmp_path, 100, "--reason", "before the loss rose").exit_code == 0
    assert listed(tmp_path)["step-00000100.g0"]["marks"] == {"pinned": "before the loss rose"}
    dry = command("prune", tmp_path, "--keep", 1, "--dry-run")
    assert dry.stdout.splitlines() == [line for line in dry.stdout.splitlines() if "step-00000200.g0" in line]
    assert len(names(tmp_path)) == 4
    assert command("prune", tmp_path, "--keep", 1).exit_code == 0
    assert names(tmp_path) == ["step-00000100.g0", "step-00000300.g0", "step-00000400.g0"]
    assert command("unpin", tmp_path, "step-00000100.g0").exit_code == 0
    assert command("prune", tmp_path, "--keep", 1).exit_code == 0
    assert names(tmp_path) == ["step-00000300.g0", "step-00000400.g0"]


def test_a_diff_at_another_number_of_ranks(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a" / "checkpoints", 100, world_size=4)
    write_checkpoint(tmp_path / "b" / "checkpoints", 100, world_size=3)
    write_checkpoint(tmp_path / "b" / "checkpoints", 107, world_size=2)
    same = command("diff", tmp_path / "a", f"{tmp_path}/b@100")
    assert (same.exit_code, same.stdout) == (0, "0 of 4 tensors differ\n")
    done = command("diff", tmp_path / "a", tmp_path / "b", "--json")
    assert done.exit_code == 1
    rows = json.loads(done.stdout)
    assert {row["tensor"] for row in rows} == {"model.even", "model.uneven", "model.few", "exp_avg.even"}
    assert {row["max_abs"] for row in rows} == {7.0}


def test_a_clock_that_jumped_changes_an_age_and_no_order(tmp_path: Path) -> None:
    """The newest was committed by a machine whose clock stood a year ahead, the one before it in 1970."""
    for step, at_s in ((100, 1.7e9), (200, 10.0), (300, 4.2e9)):
        manifest = write_checkpoint(tmp_path / "checkpoints", step) / MANIFEST
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"at_s": at_s}))
    found = listed(tmp_path)
    assert [row["step"] for row in found.values()] == [300, 200, 100]
    assert found["step-00000300.g0"]["age_s"] < 0
    assert "ahead" in command("list", tmp_path).stdout
    assert command("prune", tmp_path, "--keep", 2).exit_code == 0
    assert names(tmp_path) == ["step-00000200.g0", "step-00000300.g0"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("list", "nowhere"), "nowhere: has no folder `checkpoints`"),
        (("pin", "RUN", 150), "no checkpoint 150\nhint: there is step-00000100.g0, step-00000100.g1"),
        (("pin", "RUN", 100), "step 100 was saved by several generations\nhint: name one of step-00000100.g0"),
        (
            ("diff", "RUN@100", "RUN@step-00000100.g1"),
            "no checkpoint step-00000100.g1\nhint: there is step-00000100.g0",
        ),
    ],
)
def test_a_mistake_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[object, ...], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_checkpoint(tmp_path / "RUN" / "checkpoints", 100)
    harm(write_checkpoint(tmp_path / "RUN" / "checkpoints", 100, generation=1), "cut")
    done = command(*words)
    assert done.exit_code == 1
    assert done.stderr.startswith(f"error: {says}")


def test_all_tiers_of_a_run(tmp_path: Path, open_store: Callable[..., ObjectStore], proxy: FaultyProxy) -> None:
    """The run's directory knows its store. Copies in this machine's memory are listed, and nothing else is done to
    them. The store's address works as well, and is compared with the disk."""
    store = open_store()
    for step in (100, 200, 300):
        write_checkpoint(tmp_path / "checkpoints", step)
    disk = disk_of(tmp_path)
    for step in (100, 200):
        send(disk, store, Candidate(step, 0))
    write_store_file(tmp_path, StoreFile(store=str(store.address), endpoint=proxy.url))
    memory = folder_of("r", tmp_path, {})
    memory.mkdir(parents=True)
    try:
        slot = Slot(parts_of(tensors(310), 0, 1), 0, memory / "0.a")
        slot.fill()
        slot.seal(about(310))
        rows = json.loads(command("list", tmp_path, "--json").stdout)
        assert {(row["tier"], row["step"], row["state"]) for row in rows} == {
            ("memory", 310, "good"),
            *(("disk", step, "good") for step in (100, 200, 300)),
            *(("s3", step, "good") for step in (100, 200)),
        }
        assert command("pin", tmp_path, 100).stdout.splitlines() == [
            "disk: step-00000100.g0 is pinned",
            "s3: step-00000100.g0 is pinned",
        ]
        assert command("prune", tmp_path, "--keep", 1).exit_code == 0
        assert names(tmp_path) == ["step-00000100.g0", "step-00000300.g0"]
        assert sorted(store.candidates()) == [Candidate(100, 0), Candidate(200, 0)]
        slot.close()
    finally:
        shutil.rmtree(memory.parent)
    remote = ("--endpoint", proxy.url)
    assert command("verify", store.address, *remote).exit_code == 0
    assert command("diff", f"{tmp_path}@100", f"{store.address}@100", *remote).exit_code == 0
    assert command("diff", tmp_path, store.address, *remote).stdout.endswith("4 of 4 tensors differ\n")
    proxy.faults.append(Fault(FaultKind.FORBIDDEN))
    half = command("list", tmp_path)
    assert half.exit_code == 1
    assert "disk" in half.stdout
    assert half.stderr.startswith("error: s3: s3://checkpoints/runs/test_all_tiers_of_a_run: refused")
    assert command("list", "s3://bucket").stderr.startswith("error: s3://bucket: must be s3://bucket/prefix")


def test_verify_reads_every_byte_in_the_store(tmp_path: Path, open_store: Callable[..., ObjectStore]) -> None:
    store = open_store()
    write_checkpoint(tmp_path / "checkpoints", 100)
    disk = disk_of(tmp_path)
    send(disk, store, Candidate(100, 0))
    name = disk.manifest(Candidate(100, 0)).files[0].name
    content = bytearray(store.get(Candidate(100, 0), name))
    content[-1] ^= 1
    store.put(Candidate(100, 0), name, bytes(content))
    done = command("verify", store.address, "--endpoint", store.s3.meta.endpoint_url)
    assert done.exit_code == 1
    assert f"s3: step-00000100.g0: bad, {name}: content differs from its hash" in done.stdout
