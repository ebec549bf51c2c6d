"""Without Ray: the same loop and config under torchrun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import yaml

from captioned import captioned_images, tiny_run
from tidegate.data.prepare import prepare
from waiting import wait_until

STEPS = 100
DEADLINE_S = 120.0


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_torchrun_restarts_a_run_whose_rank_was_killed(tmp_path: Path) -> None:
    """The ranks of the second attempt meet each other, not the addresses that the first one left in the store. Tensor
    parallel, and in two stages: all of it works without Ray."""
    prepare(captioned_images(tmp_path / "images", 14), tmp_path / "data", seed=0, rows_per_shard=7)
    second = {"name": "second", "steps": STEPS // 2, "activation_checkpointing": "full", "micro_batch": 4}
    config = tiny_run(
        steps=STEPS,
        checkpoint={"every_steps": 10, "keep": 2},
        parallel={"tensor": 2},
        stages=({"name": "first", "steps": STEPS // 2}, second),
    ).model_dump(mode="json")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    command += ["--monitor-interval=0.1", "-m", "tidegate.train", "--config", str(tmp_path / "run.yaml")]
    command += ["--data", str(tmp_path / "data"), "--run-dir", str(tmp_path / "run")]
    log = tmp_path / "log"
    with (
        log.open("wb") as out,
        subprocess.Popen(
            [sys.executable, *command], stdout=out, stderr=out, env={**os.environ, "OMP_NUM_THREADS": "1"}
        ) as torchrun,
    ):
        try:
            wait_until(lambda: lines(tmp_path / "run" / "checkpoints.jsonl"), DEADLINE_S, "a checkpoint")
            ranks = psutil.Process(torchrun.pid).children()
            assert len(ranks) == 2
            ranks[1].send_signal(signal.SIGKILL)
            assert torchrun.wait(DEADLINE_S) == 0, log.read_text()
        finally:
            torchrun.kill()
    events = lines(tmp_path / "run" / "events.jsonl")
    assert [event["kind"] for event in events] == ["restored", "stage", "exported"]
    assert [line["step"] for line in lines(tmp_path / "run" / "metrics.jsonl")][-1] == STEPS
