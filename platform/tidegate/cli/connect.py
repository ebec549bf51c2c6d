"""Talk to the arbiter from a command."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import ray

from tidegate.arbiter.client import NAMESPACE, ArbiterClient
from tidegate.errors import NoArbiterError

T = TypeVar("T")

ANSWER_DEADLINE_S = 30.0
"""A person waits rather than be told that there is no arbiter when its machine is only slow."""


def connect(address: str) -> str:
    """Join the Ray cluster as a driver; the address of its dashboard, empty where it has none.

    Raises:
        NoArbiterError: there is no cluster at `address`, or it is no address.
    """
    try:
        context = ray.init(
            address=address,
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.ERROR,
            ignore_reinit_error=True,
        )
    except ConnectionError as error:
        raise NoArbiterError(f"no Ray cluster at {address}: {error}") from None
    except ValueError as error:
        raise NoArbiterError(f"{address!r} is no address of a Ray cluster: {error}\nhint: give host:port") from None
    return f"http://{context.dashboard_url}" if context.dashboard_url else ""


def ask(address: str, question: Callable[[ArbiterClient], Coroutine[Any, Any, T]]) -> T:
    """Put one question to the arbiter and leave the cluster again."""
    connect(address)
    try:
        return asyncio.run(question(ArbiterClient(timeout_s=ANSWER_DEADLINE_S)))
    finally:
        ray.shutdown()
