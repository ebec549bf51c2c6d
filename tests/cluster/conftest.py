"""A real Redis where there is one; in CI it must be there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lacking import lacking
from tidegate.testing.redis_server import RedisServer


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    if not RedisServer.is_installed():
        lacking("redis-server is not installed (apt-get install redis-server)")
    with RedisServer() as server:
        yield server
