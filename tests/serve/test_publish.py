"""`tidegate publish` from an object store: what is no export is refused before anybody is told of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import boto3
import pytest

from object_stores import BUCKET, CREDENTIALS, s3_server
from tidegate.errors import ModelRefusedError
from tidegate.serve.fetching import read_file
from tidegate.train.export_manifest import MANIFEST

TIDEGATE = Path(sys.executable).parent / "tidegate"


@pytest.fixture(scope="module")
def store() -> Iterator[Mapping[str, str]]:
    """The environment of who publishes from it."""
    with s3_server() as url:
        yield {**CREDENTIALS, "AWS_ENDPOINT_URL": url}


def publish(uri: str, environment: Mapping[str, str]) -> str:
    """What it says; it fails, as there is no cluster."""
    done = subprocess.run(
        [str(TIDEGATE), "publish", uri, "--address", "nowhere"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    return done.stderr


def test_what_is_no_export_is_refused_by_its_name(store: Mapping[str, str]) -> None:
    said = publish(f"s3://{BUCKET}/exports/none", store)
    assert f"s3://{BUCKET}/exports/none" in said
    assert f"{MANIFEST}: not there" in said


def test_an_export_passes_and_goes_to_the_arbiter(store: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in store.items():
        monkeypatch.setenv(name, value)
    uri = f"s3://{BUCKET}/exports/good"
    boto3.client("s3").put_object(Bucket=BUCKET, Key=f"exports/good/{MANIFEST}", Body=b"{}")
    assert read_file(uri, MANIFEST) == b"{}"
    assert read_file(uri, "model_index.json") is None
    with pytest.raises(ModelRefusedError, match=r"AccessDenied|NoSuchBucket|not exist|404"):
        read_file("s3://no-such-bucket/exports/good", MANIFEST)
    said = publish(uri, store)
    assert "'nowhere' is no address of a Ray cluster" in said, "it goes on to the cluster, which is not there"
