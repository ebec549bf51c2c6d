"""What an export's manifest says, for whoever needs no torch: a command that publishes it.

The folder is described in `export.py`.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from pydantic import ValidationError

from tidegate.checkpoint.files import FileSeen
from tidegate.errors import ModelRefusedError
from tidegate.spec.policy import Model

MANIFEST = "manifest.json"


class ExportManifest(Model):
    format: int = 1
    run: str
    step: int
    files: tuple[FileSeen, ...]


def export_id(folder: Path) -> str:
    """A short hash that two exports share only when every file is the same.

    Raises:
        ModelRefusedError: there is no readable manifest.
    """
    return hashlib.sha256(read_manifest(folder).model_dump_json().encode()).hexdigest()[:16]


def read_manifest(folder: Path) -> ExportManifest:
    try:
        return ExportManifest.model_validate_json((folder / MANIFEST).read_bytes())
    except OSError as error:
        raise ModelRefusedError(str(folder), f"{MANIFEST}: {error.strerror}") from None
    except ValidationError as error:
        raise ModelRefusedError(str(folder), f"{MANIFEST}: {error.errors()[0]['msg']}") from None
