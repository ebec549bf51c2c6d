from __future__ import annotations

from pathlib import Path

import pytest

from captioned import captioned_images
from tidegate.data.prepare import prepare


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """25 images that `tiny_run` trains on; only ever read."""
    root = tmp_path_factory.mktemp("set")
    prepare(captioned_images(root / "images", 25), root / "data", seed=0, rows_per_shard=10)
    return root / "data"
