"""`config.json` in a run's directory: the settings that its newest generation trains with."""

from __future__ import annotations

import contextlib
from pathlib import Path

from pydantic import ValidationError

from tidegate.checkpoint.files import write_synced
from tidegate.errors import CheckpointError
from tidegate.train.config import RunConfig

CONFIG_FILE = "config.json"


def write_config(run_dir: Path, config: RunConfig) -> None:
    """Nothing is written where it says so already."""
    content = config.model_dump_json(indent=1).encode() + b"\n"
    with contextlib.suppress(FileNotFoundError):
        if (run_dir / CONFIG_FILE).read_bytes() == content:
            return
    run_dir.mkdir(parents=True, exist_ok=True)
    write_synced(run_dir / CONFIG_FILE, content)


def read_config(run_dir: Path) -> RunConfig:
    """
    Raises:
        CheckpointError: there is none, or it is another version's.
    """
    path = run_dir / CONFIG_FILE
    try:
        return RunConfig.model_validate_json(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}\nhint: give the run's YAML file with --config") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(
            f"{path}: {where}: {first['msg']}\nhint: give the run's YAML file with --config"
        ) from None
