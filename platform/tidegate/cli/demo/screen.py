"""The demo's live display: the act, the run, the traffic, the GPU map. Without a terminal: one line for each event."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from tidegate.cli.demo.client import SteadyClient
from tidegate.cli.status import gpu_map

RECENT_S = 4.0


class Screen:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = time.monotonic()
        self._bar = Progress(
            TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[loss]}")
        )
        self._task = self._bar.add_task("training", total=None, loss="")
        self._act = "Prologue"
        self._status: Mapping[str, Any] | None = None
        self._client: SteadyClient | None = None
        # Last: it renders once while it is made.
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=2, transient=True)

    def __enter__(self) -> Screen:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def act(self, title: str) -> None:
        self._act = title
        self.say(title, style="bold")

    def say(self, line: str, style: str = "") -> None:
        took = time.monotonic() - self._began
        self._console.print(Text(f"{took:6.1f} s  ", style="dim") + Text(line, style=style), highlight=False)

    def show(self, status: Mapping[str, Any], steps: int, client: SteadyClient | None) -> None:
        """Take over what the display shows from now on."""
        self._status, self._client = status, client
        for gang in status["gangs"]:
            loss = f"loss {gang['loss']:.3f}" if gang["loss"] is not None else ""
            self._bar.update(self._task, total=steps, completed=max(0, gang["step"]), loss=loss)

    def _render(self) -> RenderableType:
        parts: list[RenderableType] = [Text(self._act, style="bold")]
        if self._status is not None:
            if self._status["gangs"]:
                parts.append(self._bar)
            parts.append(gpu_map(self._status))
        if self._client is not None:
            parts.append(Text(traffic(self._client)))
        return Group(*parts)


def traffic(client: SteadyClient) -> str:
    """Requests per second in the last seconds, by where they were answered."""
    since = time.time() - RECENT_S
    recent = [answer for answer in list(client.recent) if answer.sent_at_s + answer.took_s >= since]
    local = sum(1 for answer in recent if answer.backend.startswith("local/")) / RECENT_S
    spilled = sum(1 for answer in recent if answer.backend.startswith("provider/")) / RECENT_S
    return f"requests/s: {local:.1f} local, {spilled:.1f} spilled; {client.sent} sent, {len(client.problems)} failed"
