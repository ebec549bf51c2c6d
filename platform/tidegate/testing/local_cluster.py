"""A real Ray cluster on one machine: a head and GPU nodes with logical GPUs, each a raylet of its own.

Every process of the cluster inherits a marker in its environment, and stopping means: ask `ray start` to end, then end
whatever still carries the marker. Other Ray clusters on the machine are never touched.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tidegate.errors import PortInUseError, TidegateError

MARKER = "TIDEGATE_LOCAL_CLUSTER"
START_DEADLINE_S = 90.0
_PR_SET_PDEATHSIG = 1


class ClusterStartError(TidegateError):
    """`ray start` failed; the text ends with what it printed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """The fixed ports of the head; Ray picks all others. `--port` must lie outside 10002-19999 (Ray's worker ports)."""

    gcs: int = 6399
    dashboard: int = 8270
    serve_http: int = 8010


@dataclass(slots=True, kw_only=True)
class LocalCluster:
    """Start with `with LocalCluster(...) as cluster`; all of it is gone when the block is left, Ctrl-C included."""

    ports: Ports = field(default_factory=Ports)
    gpus_per_node: Sequence[int] = (2, 2, 2)
    head_cpus: int = 8
    node_cpus: int = 8
    environment: Mapping[str, str] = field(default_factory=dict)
    """For every process of the cluster."""
    node_environment: Sequence[Mapping[str, str]] = ()
    """For the processes of one GPU node, in order."""
    object_store_bytes: int = 200_000_000
    marker: str = field(default_factory=lambda: f"{os.getpid()}-{secrets.token_hex(4)}")
    temp_dir: Path = field(init=False)
    host: str = field(init=False, default="")
    _started: list[subprocess.Popen[bytes]] = field(init=False, default_factory=list)

    @property
    def address(self) -> str:
        return f"{self.host}:{self.ports.gcs}"

    @property
    def dashboard_url(self) -> str:
        return f"http://{self.host}:{self.ports.dashboard}"

    def __enter__(self) -> LocalCluster:
        for port, purpose in ((self.ports.gcs, "Ray's GCS"), (self.ports.dashboard, "Ray's dashboard")):
            check_port_free(port, purpose)
        # Ray's unix sockets lie below; their paths may have 107 characters at most.
        self.temp_dir = Path(tempfile.mkdtemp(prefix="tg-"))
        self.host = _own_address()
        try:
            self._start_head()
            for index in range(len(self.gpus_per_node)):
                self._start_node(index)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def client_environment(self) -> dict[str, str]:
        """For commands that talk to this cluster (`ray job submit`, `serve deploy`, `tidegate`)."""
        return {
            **os.environ,
            **self._base_environment(),
            "RAY_ADDRESS": self.address,
            "RAY_API_SERVER_ADDRESS": self.dashboard_url,
            "RAY_DASHBOARD_ADDRESS": self.dashboard_url,
        }

    def stop(self) -> None:
        """End every process of the cluster and remove its temporary folder."""
        for process in reversed(self._started):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        end_marked(self.marker, patience_s=6.0)
        for process in self._started:
            process.wait()
        self._started.clear()
        shutil.rmtree(self.temp_dir, ignore_errors=True)

    def _base_environment(self) -> dict[str, str]:
        return {
            MARKER: self.marker,
            # `python` of a job's entrypoint is ours.
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "disabled",
            "RAY_DISABLE_IMPORT_WARNING": "1",
            # A node that is told to stop has nothing to drain here: the cluster goes as a whole.
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
            "RAY_worker_niceness": "0",
            # Quick notice of a frozen node (reference: 63 s by default, 8.8 s so).
            "RAY_health_check_period_ms": "1000",
            "RAY_health_check_timeout_ms": "5000",
            "RAY_health_check_failure_threshold": "5",
            **self.environment,
        }

    def _start_head(self) -> None:
        self._ray_start(
            [
                "--head",
                f"--port={self.ports.gcs}",
                "--include-dashboard=true",
                "--dashboard-host=127.0.0.1" if self.host == "127.0.0.1" else f"--dashboard-host={self.host}",
                f"--dashboard-port={self.ports.dashboard}",
                "--num-gpus=0",
                f"--num-cpus={self.head_cpus}",
            ],
            {},
        )

    def _start_node(self, index: int) -> None:
        extra = self.node_environment[index] if index < len(self.node_environment) else {}
        self._ray_start(
            [
                f"--address={self.address}",
                f"--num-gpus={self.gpus_per_node[index]}",
                f"--num-cpus={self.node_cpus}",
                f"--labels=tidegate/name=node-{'abcdefghijklmnopqrstuvwxyz'[index % 26]}",
            ],
            extra,
        )

    def _ray_start(self, arguments: list[str], extra: Mapping[str, str]) -> None:
        log = self.temp_dir / f"start-{len(self._started)}.log"
        command = [
            sys.executable,
            "-m",
            "ray.scripts.scripts",
            "start",
            "--block",
            *arguments,
            f"--temp-dir={self.temp_dir}",
            f"--object-store-memory={self.object_store_bytes}",
            f"--dashboard-agent-listen-port={free_port()}",
            f"--metrics-export-port={free_port()}",
            f"--node-ip-address={self.host}",
            "--disable-usage-stats",
        ]
        environment = {**os.environ, **self._base_environment(), **extra}
        with log.open("wb") as out:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        self._started.append(process)
        deadline = time.monotonic() + START_DEADLINE_S
        while b"--block" not in (text := log.read_bytes()):
            if process.poll() is not None or time.monotonic() > deadline:
                raise ClusterStartError(f"ray start {' '.join(arguments)}\n{text.decode(errors='replace')[-2000:]}")
            time.sleep(0.1)


def check_port_free(port: int, purpose: str, how_to_choose: str = "choose another with --base-port") -> None:
    """Raises PortInUseError when something listens on `port`."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            raise PortInUseError(port, purpose, how_to_choose) from None


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def marked_processes(marker: str) -> Iterator[int]:
    """Process ids (not our own) whose environment carries the marker."""
    wanted = f"{MARKER}={marker}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # it has ended, or is not ours to read
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                yield int(entry.name)


def end_marked(marker: str, patience_s: float) -> None:
    """Wait until no marked process is left; kill what is left after `patience_s`."""
    deadline = time.monotonic() + patience_s
    while list(marked_processes(marker)):
        if time.monotonic() > deadline:
            for process in marked_processes(marker):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        time.sleep(0.1)


def end_with_parent() -> None:
    """A `preexec_fn`: the child gets SIGTERM when the process that started it is killed outright."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _own_address() -> str:
    """The address that Ray gives this machine: `ray start` replaces 127.0.0.1 by it, so clients must use it too."""
    import ray.util

    address: str = ray.util.get_node_ip_address()
    return address
