"""The images application with fresh weights, put on a local cluster by `tidegate up --app`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tidegate.spec.load import load_model
from tidegate.testing.local_cluster import LocalCluster
from tidegate.train.config import RunConfig
from tidegate.train.export import write_export
from tidegate.train.model import seeded
from tidegate.train.recipe import Recipe

ROOT = Path(__file__).parents[2]
MODEL = "tidegate-digits"


def write_files(folder: Path, http_port: int, args: dict[str, Any], **top: object) -> None:
    """`policy.yaml` without providers, `images.yaml` and the weights that it names."""
    policy = {"arbiter": {"state_dir": str(folder / "state")}, "serving": {"protect": False}}
    (folder / "policy.yaml").write_text(yaml.safe_dump(policy))
    config = load_model(ROOT / "jobs" / "configs" / "digits.yaml", RunConfig)
    weights = seeded(config.model, 1).state_dict()
    write_export(folder / "export", config.model, weights, Recipe.of(config), run="test", step=1)
    app = yaml.safe_load((ROOT / "serve_apps" / "images.yaml").read_text(encoding="utf-8"))
    app["http_options"]["port"] = http_port
    app["applications"][0]["args"] |= {"weights": str(folder / "export"), "policy": str(folder / "policy.yaml"), **args}
    (folder / "images.yaml").write_text(yaml.safe_dump({**app, **top}))


def up(cluster: LocalCluster, folder: Path, *more: str) -> str:
    """`tidegate up` with these files; what it said."""
    files = ["--policy", str(folder / "policy.yaml"), "--app", str(folder / "images.yaml")]
    done = subprocess.run(
        [str(Path(sys.executable).with_name("tidegate")), "up", *files, *more],
        env=cluster.client_environment(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
