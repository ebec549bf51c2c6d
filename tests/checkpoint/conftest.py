"""An S3 server that is really one: moto's, behind a proxy that can do it harm."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from tidegate.checkpoint.address import Address
from tidegate.checkpoint.object_store import ObjectStore, Patience, client
from tidegate.testing.faulty_proxy import FaultyProxy

BUCKET = "checkpoints"


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    with pytest.MonkeyPatch.context() as environment:
        give_credentials(environment)
        boto3.session.Session().client("s3", endpoint_url=url).create_bucket(Bucket=BUCKET)
    yield url
    server.stop()


@pytest.fixture(scope="session")
def only_proxy(s3_server: str) -> Iterator[FaultyProxy]:
    with FaultyProxy(s3_server) as proxy:
        yield proxy


@pytest.fixture
def proxy(only_proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """Without faults, for a start."""
    give_credentials(monkeypatch)
    only_proxy.seen.clear()
    yield only_proxy
    only_proxy.faults.clear()


@cache
def _client(url: str, attempts: int, silent_s: float) -> Any:
    """Making one takes botocore a third of a second."""
    return client(url, Patience(attempts=attempts, silent_s=silent_s))


@pytest.fixture
def open_store(proxy: FaultyProxy, request: pytest.FixtureRequest) -> Callable[..., ObjectStore]:
    """`open_store(attempts=…, silent_s=…)`: a store of this test's own."""
    address = Address(BUCKET, f"runs/{request.node.name}")

    def opened(*, attempts: int = 3, silent_s: float = 10.0, run: str | None = None) -> ObjectStore:
        return ObjectStore(address, _client(proxy.url, attempts, silent_s), run)

    return opened


def give_credentials(environment: pytest.MonkeyPatch) -> None:
    """As a machine has them. moto takes any."""
    environment.setenv("AWS_ACCESS_KEY_ID", "tidegate")
    environment.setenv("AWS_SECRET_ACCESS_KEY", "tidegate")
    environment.setenv("AWS_DEFAULT_REGION", "us-east-1")
    environment.setenv("AWS_EC2_METADATA_DISABLED", "true")
