"""Its place puts `tests/` on the import path: `from waiting import wait_until`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from lacking import lacking
from tidegate.testing.redis_server import RedisServer

if TYPE_CHECKING:
    from tidegate.testing.faulty_proxy import FaultyProxy

# An example's time says how busy the machine is, not whether the property holds.
settings.register_profile("tidegate", deadline=None)
settings.load_profile("tidegate")


@pytest.fixture(scope="session")
def only_proxy() -> Iterator[FaultyProxy]:
    # Here, so that only tests of the store import moto.
    from object_stores import s3_server
    from tidegate.testing.faulty_proxy import FaultyProxy

    with s3_server() as url, FaultyProxy(url) as proxy:
        yield proxy


@pytest.fixture
def proxy(only_proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """Before an S3 server; without faults, for a start."""
    from object_stores import CREDENTIALS

    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    only_proxy.seen.clear()
    yield only_proxy
    only_proxy.faults.clear()


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    if not RedisServer.is_installed():
        lacking("redis-server is not installed (apt-get install redis-server)")
    with RedisServer() as server:
        yield server
