"""Weights from an object store onto this node's disk: staged, checked, then renamed into place; shared by its replicas.

~/.cache/tidegate/weights/<name>-<hash>/     whole: the name says what the store listed, so another export is another
~/.cache/tidegate/weights/.<name>-<hash>/    being fetched
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from boto3.exceptions import Boto3Error

from tidegate.checkpoint.address import Address, is_address, parse_address
from tidegate.checkpoint.object_store import STREAMS, Patience, client, saying
from tidegate.checkpoint.store_errors import StoreError, Trouble
from tidegate.errors import ModelRefusedError

KEEP = 3
"""Fetched exports that stay on a node, the newest: what serves, what it may be rolled back to, and one more."""

CACHE = Path("~/.cache/tidegate/weights")

Listing = dict[str, tuple[int, str]]
"""Bytes and etag by name."""


def fetched(uri: str, cache: Path = CACHE) -> Path:
    """`uri` as a folder on this machine. A path is that already; `s3://bucket/prefix` is fetched, once.

    Raises:
        ModelRefusedError: the store can't be asked, has nothing there, or gave another number of bytes than it lists.
    """
    if not is_address(uri):
        return Path(uri)
    try:
        address = parse_address(uri)
        listed = _listed(address)
    except (StoreError, ValueError) as error:
        raise ModelRefusedError(uri, str(error)) from None
    if not listed:
        raise ModelRefusedError(uri, "there is nothing")
    cache = cache.expanduser()
    cache.mkdir(parents=True, exist_ok=True)
    name = (
        f"{address.prefix.rpartition('/')[2]}-{hashlib.sha256(repr(sorted(listed.items())).encode()).hexdigest()[:16]}"
    )
    folder = cache / name
    with _alone(cache / f".{name}.lock"):
        if not folder.exists():
            staged = cache / f".{name}"
            shutil.rmtree(staged, ignore_errors=True)
            try:
                _download(address, listed, staged)
            except StoreError as error:
                raise ModelRefusedError(uri, str(error)) from None
            except OSError as error:
                raise ModelRefusedError(uri, f"{error.filename}: {error.strerror}") from None
            staged.rename(folder)
        folder.touch()
    _forget(cache)
    return folder


def read_file(uri: str, name: str) -> bytes | None:
    """One small file of a folder, here or in a store; None where there is none.

    Raises:
        ModelRefusedError: the store can't be asked.
    """
    if not is_address(uri):
        path = Path(uri) / name
        return path.read_bytes() if path.exists() else None
    try:
        address = parse_address(uri)
        if name not in _listed(address):
            return None
        with saying(uri):
            data: bytes = (
                client(None, Patience()).get_object(Bucket=address.bucket, Key=address.key(name))["Body"].read()
            )
            return data
    except (StoreError, ValueError) as error:
        raise ModelRefusedError(uri, str(error)) from None


def _listed(address: Address) -> Listing:
    prefix = address.key("")
    with saying(str(address)):
        pages = client(None, Patience()).get_paginator("list_objects_v2").paginate(Bucket=address.bucket, Prefix=prefix)
        found = {
            str(item["Key"]).removeprefix(prefix): (int(item["Size"]), str(item["ETag"]))
            for page in pages
            for item in page.get("Contents", ())
        }
    return {name: seen for name, seen in found.items() if name and not name.endswith("/")}


def _download(address: Address, listed: Listing, staged: Path) -> None:
    store = client(None, Patience())

    def one(name: str) -> None:
        path = staged / name
        if not path.resolve().is_relative_to(staged.resolve()):
            raise OSError(0, "leads out of the folder", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        # boto3's own transfer: ranges of large objects at once, each retried.
        try:
            with saying(f"{address}/{name}"):
                store.download_file(address.bucket, address.key(name), str(path))
        except Boto3Error as error:
            raise StoreError(f"{address}/{name}", Trouble.NETWORK, str(error)) from None
        if path.stat().st_size != listed[name][0]:
            raise OSError(0, f"{path.stat().st_size} bytes came, {listed[name][0]} are listed", name)

    with ThreadPoolExecutor(min(STREAMS, 4)) as threads:
        list(threads.map(one, sorted(listed)))


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One process of this node at a time."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _forget(cache: Path) -> None:
    kept = sorted((path for path in cache.iterdir() if path.name[0] != "."), key=lambda path: path.stat().st_mtime)
    for folder in kept[:-KEEP]:
        shutil.rmtree(folder, ignore_errors=True)
