"""Start Ray on this machine with our settings, and end what was started so: never anybody else's Ray.

What is started carries a mark in its environment, and the mark stands in a record on disk for later commands.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from tidegate.checkpoint.files import write_synced
from tidegate.cluster.ray_start import CURRENT_CLUSTER, DEFAULT_TEMP_DIR, RayStart, head_start, worker_start
from tidegate.errors import TidegateError
from tidegate.ports import check_port_free
from tidegate.processes import carriers, end_family, family, program
from tidegate.spec.policy import ClusterSpec

MARK = "TIDEGATE_NODE"
START_DEADLINE_S = 120.0
STOP_PATIENCE_S = 10.0
CONNECT_DEADLINE_S = 3.0


class Role(StrEnum):
    HEAD = "head"
    WORKER = "worker"


PROGRAMS: dict[Role, frozenset[str]] = {
    Role.HEAD: frozenset({"gcs_server", "raylet"}),
    Role.WORKER: frozenset({"raylet"}),
}
"""What must run for a node to live."""


class NodeStartError(TidegateError):
    """Ray did not start here; the text names the setting at fault, or ends with what `ray start` printed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What was started here as what."""

    role: Role
    mark: str
    address: str
    """Of the head, host:port."""
    arguments: tuple[str, ...]
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ThisMachine:
    """The Ray nodes that were started on this machine by us; at most one of each role for a folder."""

    folder: Path
    """Records and `ray start`'s words lie here."""

    def start_head(self, spec: ClusterSpec) -> Iterator[str]:
        """See that a head runs here; yields what was done.

        Raises:
            PolicyError, PortInUseError, NodeStartError: nothing of it was left running.
        """
        password = spec.redis.password("cluster.redis", os.environ) if spec.redis is not None else None
        start = head_start(spec, redis_password=password)
        address = head_address(spec)
        if (running := self._running(Role.HEAD)) is not None:
            yield f"head runs already at {running.address}"
            yield from _differences(running, start)
            return
        yield from self._clear(Role.HEAD)
        if spec.redis is not None:
            _check_answers(spec.redis.address, "cluster.redis.address", "start that Redis, or correct the address")
        for field in ("gcs_port", "dashboard_port", "dashboard_agent_port"):
            _check_port_free(getattr(spec, field), f"cluster.{field}")
        # Left by a killed head, it makes `ray start` refuse while a node of the same cluster still runs here.
        current = Path(spec.temp_dir or DEFAULT_TEMP_DIR) / CURRENT_CLUSTER
        if current.exists() and current.read_text().strip() == address:
            current.unlink()
        self._start(Role.HEAD, start, address)
        yield f"head runs at {address}, dashboard at http://{spec.dashboard_host}:{spec.dashboard_port}"
        if spec.redis is not None:
            yield f"its state lies in Redis at {spec.redis.address}, namespace {spec.redis.namespace}"

    def start_worker(
        self, spec: ClusterSpec, head: str, labels: Mapping[str, str], gpus: int | None = None
    ) -> Iterator[str]:
        """See that a node of the cluster at `head` (host:port) runs here; yields what was done.

        Raises:
            PortInUseError, NodeStartError: nothing of it was left running.
        """
        start = worker_start(spec, head, labels)
        if gpus is not None:
            start = RayStart(arguments=(*start.arguments, f"--num-gpus={gpus}"), environment=start.environment)
        if (running := self._running(Role.WORKER)) is not None:
            if running.address != head:
                raise NodeStartError(
                    f"a node of the cluster at {running.address} runs here already\n"
                    f"hint: `tidegate down` first, then join {head}"
                )
            yield f"this node belongs to {running.address} already"
            yield from _differences(running, start)
            return
        yield from self._clear(Role.WORKER)
        _check_answers(head, "--join", "name the head's host and cluster.gcs_port, and see that it runs")
        if self._running(Role.HEAD) is None:  # with the head on the same machine the port is the head's already
            _check_port_free(spec.dashboard_agent_port, "cluster.dashboard_agent_port")
        self._start(Role.WORKER, start, head)
        yield f"this node has joined {head}"

    def stop(self) -> Iterator[str]:
        """End what was started here, the worker first; yields what was ended."""
        found = False
        for role in (Role.WORKER, Role.HEAD):
            record = self._read(role)
            if record is None:
                continue
            found = True
            # The raylet leaves the cluster in good order, and its workers with it, as long as its GCS still answers;
            # none of the others has anything to save.
            raylets = [pid for pid in carriers(MARK, record.mark) if program(pid) == "raylet"]
            for pid in raylets:
                _signal(pid, signal.SIGTERM)
            deadline = time.monotonic() + STOP_PATIENCE_S
            while any(program(pid) == "raylet" for pid in raylets) and time.monotonic() < deadline:
                time.sleep(0.1)
            left = end_family(MARK, record.mark)
            if left:
                raise NodeStartError(f"processes {', '.join(map(str, left))} of the {role} do not end")
            self._file(role).unlink()
            yield f"the {role} of {record.address} is stopped"
        if not found:
            yield "nothing that `tidegate up` started runs here"

    def _start(self, role: Role, start: RayStart, address: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        record = Record(
            role=role,
            mark=secrets.token_hex(8),
            address=address,
            arguments=_without_secrets(start.arguments),
            environment=start.environment,
        )
        # Written first: whatever comes up is known, should we be killed while it does.
        write_synced(self._file(role), json.dumps(asdict(record), indent=2).encode())
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *start.arguments]
        log = self.folder / f"{role}.log"
        try:
            with log.open("wb") as out:
                # To a file, not a pipe: what `ray start` leaves running would hold a pipe open for ever.
                done = subprocess.run(
                    command,
                    env={**os.environ, **start.environment, MARK: record.mark},
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    timeout=START_DEADLINE_S,
                    check=False,
                )
            failed = done.returncode != 0
        except subprocess.TimeoutExpired:
            failed = True
        if failed:
            end_family(MARK, record.mark)
            self._file(role).unlink()
            said = log.read_text(encoding="utf-8", errors="replace")[-2000:]
            raise NodeStartError(f"`ray start {' '.join(record.arguments)}` failed:\n{said}")

    def _clear(self, role: Role) -> Iterator[str]:
        """A node that has lost its raylet or its GCS is dead: end the rest of it."""
        record = self._read(role)
        if record is None:
            return
        if family(MARK, record.mark):
            end_family(MARK, record.mark)
            yield f"the {role} of {record.address} was half dead: its rest is ended"
        self._file(role).unlink()

    def _running(self, role: Role) -> Record | None:
        record = self._read(role)
        if record is None:
            return None
        names = {program(pid) for pid in carriers(MARK, record.mark)}
        return record if names >= PROGRAMS[role] else None

    def _read(self, role: Role) -> Record | None:
        try:
            values = json.loads(self._file(role).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return Record(**{**values, "role": Role(values["role"]), "arguments": tuple(values["arguments"])})

    def _file(self, role: Role) -> Path:
        return self.folder / f"{role}.json"


def head_address(spec: ClusterSpec) -> str:
    """Of a head on this machine, host:port, as Ray names it and other nodes reach it."""
    import ray.util

    return f"{ray.util.get_node_ip_address()}:{spec.gcs_port}"


def _check_port_free(port: int, field: str) -> None:
    hint = f"set {field} in policy.yaml to a free port, or end what listens there (`ss -ltnp sport = :{port}`)"
    check_port_free(port, field, hint)


def _check_answers(address: str, field: str, fix: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=CONNECT_DEADLINE_S):
            return
    except (OSError, ValueError, OverflowError) as error:
        raise NodeStartError(f"{field}: nothing answers at {address}: {error}\nhint: {fix}") from None


def _differences(running: Record, wanted: RayStart) -> Iterator[str]:
    """Settings that have changed since it was started."""
    old = {**running.environment, **_as_mapping(running.arguments)}
    new = {**wanted.environment, **_as_mapping(_without_secrets(wanted.arguments))}
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key):
            yield f"warning: {key} is {old.get(key, 'not set')} here, policy.yaml now says {new.get(key, 'not set')}"
    if old != new:
        yield "hint: `tidegate down`, then `tidegate up` again, makes it so"


def _as_mapping(arguments: tuple[str, ...]) -> dict[str, str]:
    return {name: value for name, _, value in (argument.partition("=") for argument in arguments)}


def _without_secrets(arguments: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(argument for argument in arguments if not argument.startswith("--redis-password="))


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile, which is what is wanted
        os.kill(pid, number)
