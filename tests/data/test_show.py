"""`tidegate data show`."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from captioned import captioned_images, tiny_run
from tidegate.cli.main import app
from tidegate.data.dataset import Dataset
from tidegate.data.loader import Loader
from tidegate.data.prepare import prepare


def test_the_samples_of_a_step(tmp_path: Path) -> None:
    """The same ids, captions and rows that a rank has in that step; it counts from 1 as metrics.jsonl does."""
    prepare(captioned_images(tmp_path / "images", 25), tmp_path / "data", seed=0, rows_per_shard=10)
    config, run = tmp_path / "run.yaml", tiny_run()
    config.write_text(run.model_dump_json())
    command = ["data", "show", str(tmp_path / "data"), "--config", str(config), "--step", "5"]
    rows = json.loads(CliRunner().invoke(app, [*command, "--json"], catch_exceptions=False).stdout)
    data = Dataset(tmp_path / "data", width=4, height=4, channels=1)
    with Loader(data, seed=1, global_batch=7, rank=0, world_size=1, start_step=4, end_step=5) as loader:
        [batch] = list(loader)
    assert [row["id"] for row in rows] == list(batch.ids)
    assert [row["caption"] for row in rows] == list(batch.captions)
    assert {row["size"] for row in rows} == {"4x4"}
    first = rows[0]
    assert first["id"] == 10 * int(first["shard"][6:11]) + first["row"]
    table = CliRunner().invoke(app, command, catch_exceptions=False).stdout
    assert "step 5" in table
    assert first["shard"][:9] in table


def test_what_is_wrong_is_a_sentence(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(tiny_run().model_dump_json())
    done = CliRunner().invoke(app, ["data", "show", str(tmp_path), "--config", str(config), "--step", "1"])
    assert done.exit_code == 1
    assert "hint: prepare it" in done.stderr
