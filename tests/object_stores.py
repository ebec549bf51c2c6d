"""An S3 server that is really one: moto's, over HTTP."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import boto3
from moto.server import ThreadedMotoServer

BUCKET = "checkpoints"

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "tidegate",
    "AWS_SECRET_ACCESS_KEY": "tidegate",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
"""As a machine has them in its environment. moto takes any."""


@contextmanager
def s3_server() -> Iterator[str]:
    """Its URL. It has a bucket."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    keys = {"aws_access_key_id": "tidegate", "aws_secret_access_key": "tidegate"}
    boto3.client("s3", endpoint_url=url, region_name="us-east-1", **keys).create_bucket(Bucket=BUCKET)
    yield url
    server.stop()
