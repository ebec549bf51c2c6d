"""An object store's address: `s3://bucket/prefix`. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

SHAPE = r"^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^/]+)+/?$"
"""A bucket by S3's rules for names, and a prefix: a bucket's root is no place for one run's checkpoints."""


@dataclass(frozen=True, slots=True)
class Address:
    bucket: str
    prefix: str
    """Without a slash at its end."""

    def key(self, *names: str) -> str:
        return "/".join((self.prefix, *names))

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}"


def is_address(text: str) -> bool:
    return text.startswith("s3://")


def parse_address(text: str) -> Address:
    """
    Raises:
        ValueError: it is none; says what one looks like.
    """
    if re.fullmatch(SHAPE, text) is None:
        raise ValueError(f"{text}: must be s3://bucket/prefix, the prefix one run's own")
    bucket, _, prefix = text.removeprefix("s3://").partition("/")
    return Address(bucket, prefix.rstrip("/"))
