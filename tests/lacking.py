"""What a test needs from the machine and does not find: skipped by name, and in CI a failure."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def lacking(what: str) -> NoReturn:
    if os.environ.get("CI") == "true":
        pytest.fail(f"{what}; in CI it must be there")
    pytest.skip(what)
