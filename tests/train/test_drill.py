"""Restore drills: what they find that hashes do not, and how a run tells of them."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import group, lines, train
from torch import Tensor
from typer.testing import CliRunner

from captioned import captioned_images, tiny_run
from tidegate.checkpoint import background
from tidegate.checkpoint.files import write_synced
from tidegate.checkpoint.layout import Part
from tidegate.checkpoint.manifest import MANIFEST
from tidegate.checkpoint.places import disk_of
from tidegate.checkpoint.reading import read_headers, read_parts, whole_shapes
from tidegate.checkpoint.restore import newest_good
from tidegate.checkpoint.slots import Slot
from tidegate.checkpoint.tiers import Candidate
from tidegate.cli.main import app
from tidegate.data.prepare import prepare
from tidegate.testing.fake_clock import FakeClock
from tidegate.train.drill import drill
from tidegate.train.drilled import DRILLS
from tidegate.train.drills import Drills
from tidegate.train.records import Records
from waiting import wait_until

JOB = Path(__file__).parents[2] / "jobs" / "checkpoint_drill.py"
CONFIG = tiny_run()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks."""
    root = tmp_path_factory.mktemp("drill")
    prepare(captioned_images(root / "images", 25), root / "data", seed=0, rows_per_shard=10)
    assert group(2, train, CONFIG, root / "data", root / "run", 0, {}) == [0, 0]
    return root / "run"


@pytest.fixture(autouse=True)
def _in_no_ones_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command and the job lower their own process's priority, which here is that of all tests that follow."""
    monkeypatch.setattr(background, "give_way", lambda: None)


@pytest.fixture
def run_dir(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "run")


def rewrite(run_dir: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """The newest checkpoint with other content, and hashes that fit it."""
    found = newest_good(run_dir / "checkpoints").checkpoint
    assert found is not None
    disk = disk_of(run_dir)
    candidate = Candidate(found.manifest.step, found.manifest.generation)
    with disk.source(candidate) as source:
        shapes = whole_shapes(read_headers(source, found.manifest.files))
        whole = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
        read_parts(source, found.manifest.files, [_part(name, tensor) for name, tensor in whole.items()])
    change(whole)
    for file in found.manifest.files:
        (found.folder / file.name).unlink()
    slot = Slot([_part(name, tensor) for name, tensor in whole.items()], 0)
    slot.fill()
    shard = slot.seal(found.manifest)
    (found.folder / shard.name).write_bytes(bytes(slot._memory[: shard.bytes]))
    manifest = found.manifest.model_copy(update={"files": (shard,)})
    write_synced(found.folder / MANIFEST, manifest.model_dump_json().encode())
    return found.folder


def _part(name: str, tensor: Tensor) -> Part:
    return Part(name, tensor, tuple(tensor.shape), (0,) * tensor.dim())


def test_a_good_one_lives(run_dir: Path) -> None:
    done = CliRunner().invoke(app, ["checkpoint", "drill", str(run_dir)])
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith("disk: step-00000012.g0 lives: ")
    assert "the same as safetensors' reader has it" in done.stdout
    (line,) = lines(run_dir, DRILLS)
    assert (line["good"], line["problem"], line["name"]) == (True, None, "step-00000012.g0")
    assert line["bytes"] > newest_good(run_dir / "checkpoints").checkpoint.manifest.total_bytes * 0.9  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("model.final_layer.linear.weight", float("nan"), "has numbers that are not finite"),
        ("exp_avg.final_layer.linear.weight", float("inf"), "has numbers that are not finite"),
        ("exp_avg_sq.final_layer.linear.weight", -1.0, "has negative numbers"),
        ("model.final_layer.linear.weight", 3e38, "the restored network's guess is not finite"),
    ],
)
def test_what_hashes_do_not_find_is_marked_and_never_restored(
    run_dir: Path, name: str, value: float, says: str
) -> None:
    def change(whole: dict[str, Tensor]) -> None:
        whole[name].fill_(value)

    folder = rewrite(run_dir, change)
    disk = disk_of(run_dir)
    assert newest_good(run_dir / "checkpoints").checkpoint.folder == folder  # type: ignore[union-attr]
    drilled = drill(disk, CONFIG)
    assert not drilled.good
    assert drilled.problem is not None
    assert says in drilled.problem
    found = newest_good(run_dir / "checkpoints")
    assert found.checkpoint is not None
    assert found.checkpoint.manifest.step == 9
    assert says in str(found.skipped[0])
    assert drill(disk, CONFIG).name == "step-00000009.g0", "the next drill goes on with the one before"


def test_a_rotten_one_is_marked(run_dir: Path) -> None:
    folder = run_dir / "checkpoints" / "step-00000012.g0"
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-1] + b"\0")
    done = CliRunner().invoke(app, ["checkpoint", "drill", str(run_dir)])
    assert done.exit_code == 1
    assert f"disk: step-00000012.g0 is bad, and marked: {shard.name}: content differs" in done.stdout
    listed = json.loads(CliRunner().invoke(app, ["checkpoint", "list", str(run_dir), "--json"]).stdout)
    assert listed[0]["state"] == "bad"
    assert listed[0]["why"].startswith("marked bad: restore drill: ")


def test_settings_of_another_network_mark_nothing(run_dir: Path) -> None:
    other = CONFIG.model_copy(update={"model": CONFIG.model.model_copy(update={"num_layers": 3})})
    drilled = drill(disk_of(run_dir), other)
    assert drilled.good
    assert drilled.problem is not None
    assert drilled.problem.startswith("not the network of the run's settings: ")
    assert newest_good(run_dir / "checkpoints").skipped == ()


def test_the_job(run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [str(JOB), str(run_dir)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(JOB), run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("disk: step-00000012.g0 lives")


def test_a_run_drills_what_is_new_when_it_is_due(run_dir: Path) -> None:
    """In a real process; then the newest turns out bad, and the run says so aloud."""
    clock = FakeClock()

    def spoil(whole: dict[str, Tensor]) -> None:
        whole["model.final_layer.linear.weight"].fill_(float("nan"))

    def told(kind: str) -> list[dict[str, Any]]:
        drills.poll()
        return [line for line in lines(run_dir, "events.jsonl") if line["kind"] == kind]

    with (
        Records(run_dir, writes=True, world_size=2, generation=0, log_every_steps=1) as records,
        Drills(60.0, run_dir, records, clock=clock.now_s) as drills,
    ):
        clock.advance(61)
        drills.poll()
        assert drills._process is None, "nothing is new"
        drills.committed()
        wait_until(lambda: told("drill_passed"), 60, "the drill passes")
        drills.committed()
        drills.poll()
        assert drills._process is None, "not due yet"
        rewrite(run_dir, spoil)
        clock.advance(61)
        wait_until(lambda: told("drill_failed"), 60, "the drill fails")
        (failed,) = told("drill_failed")
        assert (failed["checkpoint"], failed["tier"]) == ("step-00000012.g0", "disk")
        assert failed["reason"].endswith("not finite; it is marked bad")
