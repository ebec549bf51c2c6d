"""A real Redis on a free port, for clusters whose head is to be killed: `with RedisServer() as redis: … redis.spec`."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from tidegate.errors import TidegateError
from tidegate.ports import free_port
from tidegate.spec.policy import RedisSpec
from tidegate.testing.local_cluster import end_with_parent

PROGRAM = "redis-server"
START_DEADLINE_S = 20.0


class RedisStartError(TidegateError):
    """`redis-server` is not installed, or did not answer; the text says which."""


@dataclass(slots=True)
class RedisServer:
    port: int = field(default_factory=free_port)
    _process: subprocess.Popen[bytes] | None = field(init=False, default=None)
    _folder: str = field(init=False, default="")

    @staticmethod
    def is_installed() -> bool:
        return shutil.which(PROGRAM) is not None

    @property
    def spec(self) -> RedisSpec:
        return RedisSpec(address=f"127.0.0.1:{self.port}")

    def __enter__(self) -> RedisServer:
        if not self.is_installed():
            raise RedisStartError(f"{PROGRAM} is not installed\nhint: apt-get install redis-server")
        self._folder = tempfile.mkdtemp(prefix="tg-redis-")
        log = Path(self._folder) / "log"
        # In memory only: it outlives the head, and that is all that is asked of it.
        options = {"port": self.port, "bind": "127.0.0.1", "save": "", "appendonly": "no", "dir": self._folder}
        command = [PROGRAM, *(text for key, value in options.items() for text in (f"--{key}", str(value)))]
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, preexec_fn=end_with_parent
            )
        deadline = time.monotonic() + START_DEADLINE_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                said = log.read_text(errors="replace")[-1000:]
                self.__exit__()
                raise RedisStartError(f"{' '.join(command)} did not answer:\n{said}")
            time.sleep(0.05)
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(16).startswith(b"+PONG")
        except OSError:
            return False
