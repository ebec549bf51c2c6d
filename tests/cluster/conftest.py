"""A real Redis where there is one; in CI it must be there."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tidegate.testing.redis_server import RedisServer


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    if not RedisServer.is_installed():
        missing = "redis-server is not installed (apt-get install redis-server)"
        if os.environ.get("CI") == "true":
            pytest.fail(f"{missing}, and CI tests the loss of the head")
        pytest.skip(missing)
    with RedisServer() as server:
        yield server
