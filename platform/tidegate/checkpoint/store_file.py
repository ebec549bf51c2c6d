"""`store.json` in a run's directory: where its object store is, so that commands on the directory find it."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from tidegate.checkpoint.files import write_synced
from tidegate.errors import CheckpointError
from tidegate.spec.policy import Model

STORE_FILE = "store.json"


class StoreFile(Model):
    store: str
    """Its address."""
    endpoint: str | None = None


def write_store_file(run_dir: Path, store: StoreFile) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    write_synced(run_dir / STORE_FILE, store.model_dump_json().encode() + b"\n")


def read_store_file(run_dir: Path) -> StoreFile | None:
    """None where the run has no store.

    Raises:
        CheckpointError: the file is there and cannot be read.
    """
    try:
        return StoreFile.model_validate_json((run_dir / STORE_FILE).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise CheckpointError(f"{run_dir / STORE_FILE}: cannot be read: {error}") from None
