"""A light gateway as a process of its own: real HTTP, the real `openai` client, no Ray."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import yaml
from stand_in import answers

from tidegate.ports import free_port
from tidegate.serve.ledger_reading import RequestRow, read_rows
from waiting import wait_until

MODEL = "tidegate-digits"


@dataclass
class Light:
    """Started and stopped by `running`; the same folder and port again after a restart."""

    folder: Path
    policy: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        return self.folder / "gateway.log"

    def start(self) -> None:
        path = self.folder / "policy.yaml"
        path.write_text(yaml.safe_dump({**self.policy, "arbiter": {"state_dir": str(self.folder / "state")}}))
        command = [sys.executable, "-m", "tidegate.testing.light_gateway", "--port", str(self.port)]
        command += ["--policy", str(path), *self.arguments]
        with self.log.open("ab") as log:
            environment = {**os.environ, **self.env}
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        wait_until(lambda: self.dead() or answers(self.url), 20, "the light gateway to answer")
        assert not self.dead(), self.log.read_text()

    def dead(self) -> bool:
        return self.process is None or self.process.poll() is not None

    def kill(self) -> None:
        """As a machine's end does: no goodbye."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait(10)

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=20)

    def rows(self) -> dict[str, RequestRow]:
        return {row.request_id: row for row in read_rows(self.folder / "state" / "ledger")}


@contextmanager
def running(light: Light) -> Iterator[Light]:
    light.folder.mkdir(parents=True, exist_ok=True)
    light.start()
    try:
        yield light
    finally:
        light.stop()
