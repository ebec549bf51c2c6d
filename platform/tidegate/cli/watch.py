"""`tidegate watch`: the status, again and again, in one place on the screen."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from tidegate.arbiter.client import ArbiterClient
from tidegate.cli.connect import ANSWER_DEADLINE_S, connect
from tidegate.cli.status import status_view
from tidegate.errors import NoArbiterError


def watch_cluster(address: str, console: Console, *, every_s: float, once: bool) -> None:
    """Show the cluster's status until Ctrl-C.

    Raises:
        NoArbiterError: there is no cluster, or (with `once`) no arbiter.
    """
    connect(address)
    # Who asks once waits for the answer; a picture says sooner that there is none.
    client = ArbiterClient(timeout_s=ANSWER_DEADLINE_S if once else 5.0)
    try:
        show(lambda: asyncio.run(client.status()), console, pause=lambda: time.sleep(every_s), once=once)
    finally:
        ray.shutdown()


def show(look: Callable[[], Mapping[str, Any]], console: Console, *, pause: Callable[[], None], once: bool) -> None:
    """Draw what `look` gives, `pause`, and again until KeyboardInterrupt; with `once` a single time.

    An arbiter that is away leaves the last picture with a line beneath it.

    Raises:
        NoArbiterError: with `once`, from `look`.
    """
    if once:
        console.print(status_view(look()))
        return
    picture: RenderableType = Text("no word from the arbiter yet")
    try:
        with Live(picture, console=console, auto_refresh=False) as live:
            while True:
                try:
                    picture = status_view(look())
                    live.update(picture, refresh=True)
                except NoArbiterError as error:
                    live.update(Group(picture, Text(f"{error.detail}; still asking", style="red")), refresh=True)
                pause()
    except KeyboardInterrupt:
        return  # how a person ends it
