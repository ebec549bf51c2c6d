"""The benchmarks of checkpoints: every contender saves and loads what it was given, and a round becomes figures."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.contenders import loads, raw_files, saves  # noqa: E402

from benchmarks import checkpoint_drain, checkpoint_restore, checkpoint_save, checkpoint_stall  # noqa: E402


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["ours", "dcp_thread", "dcp_default", "safetensors", "raw", "raw_beside"])
def test_a_contender_saves(name: str, joined: None, tmp_path: Path) -> None:
    loop = saves.Loop(width=256, layers=2, batch=2)
    found = []
    for kind, measure in saves.MEASURES.items():
        (tmp_path / kind).mkdir()
        contender = saves.CONTENDERS[name](loop, tmp_path / kind)
        found.append(measure(contender, loop, saves=1))
        contender.close()
    stall, durable = found
    assert durable["bytes"] == 2 * 256 * 256 * 4 * 3
    assert 0 < stall["stall_s"] <= durable["durable_s"] * 100
    assert stall["memcpy_s"] > 0


def test_every_restore_is_of_what_was_saved(joined: None, tmp_path: Path) -> None:
    took = loads.measure(tmp_path / "bench", width=256, layers=2)
    assert min(took.disk_s, took.memory_s, took.dcp_s, took.raw_s, took.memcpy_s) > 0
    assert not (tmp_path / "bench").exists()
    assert not (Path("/dev/shm/tidegate-bench") / str(os.getpid())).exists()


def test_a_restore_that_is_wrong_is_no_figure() -> None:
    with pytest.raises(RuntimeError, match="model is not what was saved"):
        loads._check({"model": torch.zeros(3)}.items(), {"model": 1.0})


def test_raw_files(tmp_path: Path) -> None:
    raw_files.write_direct(tmp_path / "file", 10_000_001)
    assert (tmp_path / "file").stat().st_size == raw_files.read_direct(tmp_path / "file") == 10_000_001


def test_figures_of_a_round() -> None:
    mine = {"bytes": 2e9, "memcpy_s": 0.4, "stall_s": 0.44, "durable_s": 1.0}
    peers = {name: [{"stall_s": 1.0 + number}] for number, name in enumerate(checkpoint_stall.PEERS)}
    stall = checkpoint_stall.metrics_of({"ours": [mine], **peers})
    assert stall["over_memcpy"].ratio == pytest.approx(1.1)
    assert stall["over_best_peer"].ratio == pytest.approx(0.44)
    assert all(metric.holds for metric in stall.values())
    drain = checkpoint_drain.metrics_of(
        {"ours": [{"slowdown": 1.06, "drained_s": 4.0}], "raw_beside": [{"slowdown": 1.2, "drained_s": 2.5}]}
    )
    assert drain["step_while_saving"].note == "drained in 4.0 s, the raw writes in 2.5 s"
    assert drain["over_raw_writes"].ratio == pytest.approx(1.06 / 1.2)
    assert all(metric.holds for metric in drain.values())
    others = {"raw": 0.8, "dcp_default": 4.0, "safetensors": 1.5}
    rounds = {name: [{"bytes": 2e9, "durable_s": seconds}] for name, seconds in others.items()}
    save = checkpoint_save.metrics_of({"ours": [mine], **rounds})
    assert [metric.ratio for metric in save.values()] == pytest.approx([0.8, 4.0, 1.5])
    assert [metric.holds for metric in save.values()] == [False, True, True]
    one = {"bytes": 2e9, "disk_s": 1.0, "memory_s": 0.5, "dcp_s": 4.0, "raw_s": 0.95, "memcpy_s": 0.4}
    restored = checkpoint_restore.metrics_of([one])
    assert [metric.ratio for metric in restored.values()] == pytest.approx([0.95, 0.8, 4.0])
