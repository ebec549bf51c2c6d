"""A run and its object store: what it tells of uploads, when it stops for them, and how it comes back from there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from ranks import group, lines, train

from captioned import tiny_run
from object_stores import BUCKET, CREDENTIALS
from tidegate.checkpoint.files import write_synced
from tidegate.checkpoint.manifest import MANIFEST, Manifest, folder_name
from tidegate.checkpoint.marks import Mark
from tidegate.checkpoint.places import marked
from tidegate.checkpoint.restore import full_model_weights, newest_good
from tidegate.checkpoint.tiers import Candidate, Disk
from tidegate.errors import CheckpointError
from tidegate.testing.faulty_proxy import Fault, FaultKind, FaultyProxy
from tidegate.train.config import CheckpointSpec, RunConfig
from tidegate.train.parallel import joined
from tidegate.train.progress import NullProgress
from tidegate.train.records import Records
from tidegate.train.shipping import Shipping
from waiting import wait_until


def stored(proxy: FaultyProxy, prefix: str, **changes: Any) -> dict[str, Any]:
    store = {"store": f"s3://{BUCKET}/{prefix}", "store_endpoint": proxy.url, "store_attempts": 1}
    return {"every_steps": 3, "keep": 2, **store, **changes}


def stopped(rank: int, error_at: Path, config: RunConfig, data: Path, run_dir: Path, generation: int) -> None:
    """A rank that leaves its error behind. Its environment is that of the server it was forked from: without keys."""
    os.environ |= CREDENTIALS
    try:
        train(rank, config, data, run_dir, generation, {})
    except CheckpointError as error:
        (error_at / f"{rank}").write_text(str(error))
        raise SystemExit(1) from None


def errors(folder: Path) -> set[str]:
    return {path.read_text() for path in folder.iterdir()}


def test_a_run_that_lost_its_disk_comes_back_from_the_store(data: Path, proxy: FaultyProxy, tmp_path: Path) -> None:
    """The last checkpoint is sent before the run ends. On a new disk two ranks go on where one was, from the store."""
    config = tiny_run(checkpoint=stored(proxy, "lost", store_keep=1))
    notes, run_dir = tmp_path / "notes", tmp_path / "run"
    notes.mkdir()
    assert group(1, stopped, notes, config, data, run_dir, 0) == [0]
    uploaded = [line for line in lines(run_dir, "events.jsonl") if line["kind"] == "uploaded"]
    assert uploaded[-1]["checkpoint"] == "step-00000012.g0"
    before = newest_good(run_dir / "checkpoints").checkpoint
    assert before is not None
    weights = full_model_weights(before)
    shutil.rmtree(run_dir)

    longer = config.model_copy(update={"steps": 13})
    assert group(2, stopped, notes, longer, data, run_dir, 1) == [0, 0]
    (restored,) = [line for line in lines(run_dir, "events.jsonl") if line["kind"] == "restored"]
    assert (restored["tier"], restored["step"]) == ("s3", 12)
    assert [line["step"] for line in lines(run_dir, "metrics.jsonl")] == [13]
    after = newest_good(run_dir / "checkpoints").checkpoint
    assert after is not None
    assert after.manifest.step == 13
    moved = full_model_weights(after)
    assert all((moved[name] - tensor).abs().max() < 0.1 for name, tensor in weights.items())


def test_a_store_that_nobody_can_use_is_refused_before_the_first_step(
    data: Path, proxy: FaultyProxy, tmp_path: Path
) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    config = tiny_run(checkpoint=stored(proxy, "x") | {"store": "s3://no-such-bucket/x"})
    assert group(2, stopped, notes, config, data, tmp_path / "run", 0) == [1, 1]
    (said,) = errors(notes)
    assert said.startswith("checkpoint.store: s3://no-such-bucket/x: not there (HTTP 404")
    assert "hint: create the bucket" in said
    assert lines(tmp_path / "run", "metrics.jsonl") == []


def test_a_run_does_not_begin_anew_beside_what_it_could_not_read(
    data: Path, proxy: FaultyProxy, tmp_path: Path
) -> None:
    """The disk is lost, and the store is throttled for the moment in which the restore asks it."""
    notes, run_dir = tmp_path / "notes", tmp_path / "run"
    notes.mkdir()
    config = tiny_run(checkpoint=stored(proxy, "unread"))
    proxy.faults.append(Fault(FaultKind.BARE_503, method="GET", path="list-type", times=1))
    assert group(1, stopped, notes, config, data, run_dir, 0) == [1]
    (said,) = errors(notes)
    assert said.startswith("checkpoint.store: s3://checkpoints/unread: what is there could not be restored")
    assert "throttled (HTTP 503)\nhint: submit again" in said
    assert lines(run_dir, "metrics.jsonl") == []


def test_the_last_checkpoint_that_does_not_arrive_ends_the_run_with_an_error(
    data: Path, proxy: FaultyProxy, tmp_path: Path
) -> None:
    """C067: all ranks end with the same sentence; checkpoint and export are there."""
    notes, run_dir = tmp_path / "notes", tmp_path / "run"
    notes.mkdir()
    proxy.faults.append(Fault(FaultKind.SLOW_DOWN, method="PUT", path="refused/step-"))
    config = tiny_run(checkpoint=stored(proxy, "refused"))
    assert group(2, stopped, notes, config, data, run_dir, 0) == [1, 1]
    (said,) = errors(notes)
    assert said.startswith("the last checkpoint is on disk, but not in the store: s3://checkpoints/refused/step-0000")
    assert said.endswith("throttled (HTTP 503 SlowDown)")
    assert (run_dir / "export").is_dir()
    assert newest_good(run_dir / "checkpoints").checkpoint is not None


def commit(run_dir: Path, step: int) -> None:
    """A checkpoint without shards: what is sent is its manifest."""
    about = Manifest(
        run="tiny", generation=0, step=step, updates=step, seed=0, global_batch=7, dataset="d", world_size=0
    )
    folder = run_dir / "checkpoints" / folder_name(step, 0)
    folder.mkdir(parents=True)
    write_synced(folder / MANIFEST, about.model_dump_json().encode())


def test_failures_in_a_row_are_counted_and_then_the_run_stops(proxy: FaultyProxy, tmp_path: Path) -> None:
    """C067, C069: uploads of saves 3 and 4 fail and 5 works; then three in a row and a fourth; a bare 503."""
    spec = CheckpointSpec.model_validate(stored(proxy, "counted", every_steps=1))
    proxy.faults.append(Fault(FaultKind.BARE_503, method="PUT", path=r"counted/step-0000000[3-46-9]"))
    gave_up = []
    with (
        Records(tmp_path, writes=True, world_size=1, generation=0, log_every_steps=1) as records,
        Shipping(spec, "tiny", tmp_path, records, rank=0, generation=0) as shipping,
    ):
        for step in range(1, 10):
            commit(tmp_path, step)
            shipping.committed(step)
            assert shipping._courier is not None
            for delivered in shipping._courier.wait(60):
                shipping._settle(delivered)
            gave_up.append(shipping.gave_up)
    seen = [line for line in lines(tmp_path, "events.jsonl") if line["kind"] in ("uploaded", "upload_failed")]
    assert [line.get("in_a_row", 0) for line in seen] == [0, 0, 1, 2, 0, 1, 2, 3, 4]
    assert gave_up[:-1] == [None] * 8
    assert gave_up[-1] is not None
    assert gave_up[-1].startswith(f"4 checkpoints in a row did not reach s3://{BUCKET}/counted: ")
    assert "throttled (HTTP 503)\nhint: they are on disk" in gave_up[-1]


def test_a_run_that_is_told_to_leave_waits_for_no_upload(proxy: FaultyProxy, tmp_path: Path) -> None:
    """Nor does one that failed make an error of it: its checkpoint is marked, and goes with the next start."""
    spec = CheckpointSpec.model_validate(stored(proxy, "leaving", every_steps=1))
    hang = Fault(FaultKind.HANG, method="PUT", path="leaving/step-00000001")
    proxy.faults.append(hang)
    with joined(30) as world, Records(tmp_path, writes=True, world_size=1, generation=0, log_every_steps=1) as records:
        with Shipping(spec, "tiny", tmp_path, records, rank=0, generation=0) as shipping:
            commit(tmp_path, 1)
            shipping.committed(1)
            wait_until(lambda: hang.times < 1_000_000, 60, "the upload hangs")
            assert shipping.last(NullProgress(), world.saving, wait=False) is None
        assert marked(Disk(tmp_path / "checkpoints"), Mark.SENDING) == [Candidate(1, 0)]
        proxy.faults.clear()
        with Shipping(spec, "tiny", tmp_path, records, rank=0, generation=1) as shipping:
            assert shipping.last(NullProgress(), world.saving, wait=True) is None
    (uploaded,) = [line for line in lines(tmp_path, "events.jsonl") if line["kind"] == "uploaded"]
    assert uploaded["checkpoint"] == "step-00000001.g0"
