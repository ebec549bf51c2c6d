"""A real Ray cluster on one machine: a head and GPU nodes with logical GPUs, each a raylet of its own.

Every process of the cluster inherits a marker in its environment, and stopping means: ask `ray start` to end, then end
whatever still carries the marker. Other Ray clusters on the machine are never touched.

Nodes can be killed, frozen and started while it runs, the head too; see `kill_head` for what that needs.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tidegate.cluster.ray_start import CURRENT_CLUSTER, RayStart, head_start, worker_start
from tidegate.errors import TidegateError
from tidegate.ports import check_port_free, free_port
from tidegate.processes import carriers, end_family, family, program
from tidegate.spec.policy import ClusterSpec, RedisSpec

log = logging.getLogger(__name__)

MARKER = "TIDEGATE_LOCAL_CLUSTER"
NODE_MARKER = "TIDEGATE_LOCAL_NODE"
START_DEADLINE_S = 150.0
START_TRIES = 3
CHOOSE_ANOTHER = "choose another with --base-port"
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
    redis: RedisSpec | None = None
    """Where GCS keeps its state; needed to restart the head."""
    haproxy: bool = False
    object_store_bytes: int = 200_000_000
    marker: str = field(default_factory=lambda: f"{os.getpid()}-{secrets.token_hex(4)}")
    temp_dir: Path = field(init=False)
    host: str = field(init=False, default="")
    _started: list[subprocess.Popen[bytes]] = field(init=False, default_factory=list)
    _lives: int = field(init=False, default=0)

    @property
    def address(self) -> str:
        return f"{self.host}:{self.ports.gcs}"

    @property
    def dashboard_url(self) -> str:
        return f"http://{self.host}:{self.ports.dashboard}"

    def __enter__(self) -> LocalCluster:
        for port, purpose in ((self.ports.gcs, "Ray's GCS"), (self.ports.dashboard, "Ray's dashboard")):
            check_port_free(port, purpose, CHOOSE_ANOTHER)
        # Ray's unix sockets lie below; their paths may have 107 characters at most.
        self.temp_dir = Path(tempfile.mkdtemp(prefix="tg-"))
        self.host = _own_address()
        try:
            self._start_head()
            for index in range(len(self.gpus_per_node)):
                self.start_node(index)
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
            # The default is 30 s, which a machine that is busy with other clusters may need for a raylet alone.
            "RAY_raylet_start_wait_time_s": "120",
            **self.environment,
        }

    # What a test does to it

    def start_node(self, index: int) -> None:
        """Start GPU node `index` (from 0), again too after `kill_node`: it comes with the same name and a new id."""
        extra = self.node_environment[index] if index < len(self.node_environment) else {}
        labels = {"tidegate/name": f"node-{'abcdefghijklmnopqrstuvwxyz'[index % 26]}"}
        start = worker_start(self._settings(), self.address, labels)
        own = [f"--num-gpus={self.gpus_per_node[index]}", f"--num-cpus={self.node_cpus}"]
        self._ray_start(start, own, {NODE_MARKER: self._node_mark(index), **extra})

    def kill_node(self, index: int) -> None:
        """SIGKILL every process of GPU node `index`, ranks and replicas included: its machine has lost power.

        GCS notices by its health checks, about 3 s later.
        """
        self._kill(self._node_mark(index))

    def freeze_node(self, index: int) -> None:
        """SIGSTOP every process of GPU node `index`: no connection ends, nothing answers. End it with `kill_node`."""
        for pid in self.node_processes(index):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)

    def kill_head(self) -> None:
        """SIGKILL every process of the head: GCS, dashboard, arbiter, Serve's controller, whatever runs there.

        With `redis` the GPU nodes run on and wait for `restart_head`; without it they end after a while.
        """
        self._kill(self._node_mark(None))

    def restart_head(self) -> None:
        """Start a killed head again, on the same ports. It has a new node id; what was detached comes back."""
        if self.redis is None:
            raise ClusterStartError("a head can be restarted only where GCS kept its state: give `redis`")
        # While GPU nodes of the cluster run on this machine, this file makes `ray start` refuse a second head.
        (self.temp_dir / CURRENT_CLUSTER).unlink(missing_ok=True)
        self._start_head()

    def head_processes(self) -> tuple[int, ...]:
        return family(NODE_MARKER, self._node_mark(None))

    def node_processes(self, index: int) -> tuple[int, ...]:
        return family(NODE_MARKER, self._node_mark(index))

    def _kill(self, mark: str) -> None:
        end_family(NODE_MARKER, mark)
        for process in [process for process in self._started if process.poll() is not None]:
            self._started.remove(process)

    def _node_mark(self, index: int | None) -> str:
        return f"{self.marker}/{'head' if index is None else index}"

    def _settings(self) -> ClusterSpec:
        return ClusterSpec(
            gcs_port=self.ports.gcs,
            dashboard_host=self.host,
            dashboard_port=self.ports.dashboard,
            # Nodes of one machine can't share these: each start gets free ones.
            dashboard_agent_port=free_port(),
            metrics_port=free_port(),
            haproxy_stats_port=free_port(),
            haproxy_metrics_port=free_port(),
            redis=self.redis,
            haproxy=self.haproxy,
            temp_dir=str(self.temp_dir),
        )

    def _start_head(self) -> None:
        own = [f"--num-cpus={self.head_cpus}"]
        self._ray_start(head_start(self._settings()), own, {NODE_MARKER: self._node_mark(None)})

    def _ray_start(self, start: RayStart, own: Sequence[str], extra: Mapping[str, str]) -> None:
        """In up to three tries: a raylet gives its agents 15 s (a constant of Ray's), and dies where they need more."""
        for _ in range(START_TRIES - 1):
            try:
                return self._try_ray_start(start, own, extra)
            except ClusterStartError as error:
                log.warning("a node did not start, once more: %s", error)
                self._kill(extra[NODE_MARKER])
        return self._try_ray_start(start, own, extra)

    def _try_ray_start(self, start: RayStart, own: Sequence[str], extra: Mapping[str, str]) -> None:
        self._lives += 1
        said = self.temp_dir / f"start-{self._lives}.log"
        command = [
            sys.executable,
            "-m",
            "ray.scripts.scripts",
            "start",
            "--block",
            *start.arguments,
            *own,
            # Else the raylet waits 15 s for its agents to choose, and dies when the machine is too busy for that.
            f"--dashboard-agent-grpc-port={free_port()}",
            f"--runtime-env-agent-port={free_port()}",
            f"--object-store-memory={self.object_store_bytes}",
            f"--node-ip-address={self.host}",
        ]
        environment = {**os.environ, **start.environment, **self._base_environment(), **extra}
        with said.open("wb") as out:
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
        deadline, had_raylet = time.monotonic() + START_DEADLINE_S, False
        while b"--block" not in (text := said.read_bytes()):
            # `ray start` itself waits for a raylet that has died.
            has_raylet = any(program(pid) == "raylet" for pid in carriers(NODE_MARKER, extra[NODE_MARKER]))
            died = had_raylet and not has_raylet
            had_raylet = has_raylet
            if died or process.poll() is not None or time.monotonic() > deadline:
                raise ClusterStartError(f"ray start {' '.join(command[5:])}\n{text.decode(errors='replace')[-2000:]}")
            time.sleep(0.25)


def marked_processes(marker: str) -> tuple[int, ...]:
    """Process ids (not our own) whose environment carries the marker."""
    return carriers(MARKER, marker)


def end_marked(marker: str, patience_s: float) -> None:
    """Wait until no marked process is left; kill what is left after `patience_s`."""
    deadline = time.monotonic() + patience_s
    while marked_processes(marker):
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
