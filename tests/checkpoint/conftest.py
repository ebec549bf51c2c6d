"""An object store of each test's own, behind a proxy that can do it harm."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from object_stores import BUCKET
from tidegate.checkpoint.address import Address
from tidegate.checkpoint.object_store import ObjectStore, Patience, client
from tidegate.testing.faulty_proxy import FaultyProxy


@cache
def _client(url: str, patience: Patience) -> Any:
    """Making one takes botocore a third of a second."""
    return client(url, patience)


@pytest.fixture
def open_store(proxy: FaultyProxy, request: pytest.FixtureRequest) -> Callable[..., ObjectStore]:
    """`open_store(attempts=…, silent_s=…)`: a store of this test's own."""
    address = Address(BUCKET, f"runs/{request.node.name}")

    def opened(*, attempts: int = 3, silent_s: float = 10.0, run: str | None = None) -> ObjectStore:
        store = ObjectStore(address, proxy.url, run=run)
        store.s3 = _client(proxy.url, Patience(attempts=attempts, silent_s=silent_s))
        return store

    return opened
