"""What an InfiniBand port carries to itself, by perftest's `ib_write_bw`, where it is installed."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tidegate.health.marks import Check
from tidegate.ports import free_port

SECONDS = 3
"""Of traffic, on all ports at once."""
DEADLINE_S = 30.0
SERVER_LISTENS_S = 0.5
"""perftest's client gives up at once where nobody listens yet: it is started a little later, and again if need be."""
TRIES = 5
FLOORS_GBITS: Mapping[float, float] = {400.0: 380.0, 200.0: 180.0}
"""By the port's rate, NDR and HDR (specification 5)."""
FLOOR_SHARE = 0.9
"""Of any other rate."""
# Bytes, iterations, peak, average and message rate; `--report_gbits` makes both bandwidths Gbit/s.
_ROW = re.compile(r"^\s*\d+\s+\d+\s+[\d.]+\s+([\d.]+)\s+[\d.]+\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class _Try:
    gbits: float | None
    why: str


def floor_gbits(rate_gbits: float) -> float:
    return FLOORS_GBITS.get(rate_gbits, FLOOR_SHARE * rate_gbits)


def average_gbits(text: str) -> float | None:
    """The average bandwidth in what `ib_write_bw --report_gbits` prints; None where it tells none."""
    found = _ROW.findall(text)
    return float(found[-1]) if found else None


def loopbacks(program: str, rates_gbits: Mapping[str, float], deadline_s: float = DEADLINE_S) -> list[Check]:
    """A check for each port, `mlx5_0/1`, with its rate in Gbit/s. Blocks for a few seconds, at most `deadline_s`."""
    ends_s = time.monotonic() + deadline_s
    servers = {port: _start(program, port) for port in rates_gbits}
    clients = {port: (*server, _client(program, port, server[1])) for port, server in servers.items()}
    checks = []
    for port, (server, number, client) in clients.items():
        seen = _end(client, ends_s)
        for _ in range(TRIES - 1):
            if seen.gbits is not None or "connect" not in seen.why or time.monotonic() > ends_s:
                break
            seen = _end(_client(program, port, number), ends_s)
        server.kill()
        server.communicate()
        least = floor_gbits(rates_gbits[port])
        good = seen.gbits is not None and seen.gbits >= least
        text = seen.why if seen.gbits is None else f"{seen.gbits:.1f} Gbit/s, at least {least:g}"
        checks.append(Check(name="InfiniBand loopback", subject=port, passed=good, text=text))
    return checks


def _command(program: str, port: str, number: int) -> list[str]:
    device, _, index = port.partition("/")
    options = ["-d", device, "-i", index or "1", "-p", str(number), "-D", str(SECONDS), "-F", "--report_gbits"]
    return [program, *options]


def _start(program: str, port: str) -> tuple[subprocess.Popen[str], int]:
    number = free_port()
    return _popen(_command(program, port, number)), number


def _client(program: str, port: str, number: int) -> subprocess.Popen[str]:
    time.sleep(SERVER_LISTENS_S)
    return _popen([*_command(program, port, number), "127.0.0.1"])


def _popen(command: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )


def _end(client: subprocess.Popen[str], ends_s: float) -> _Try:
    try:
        said, _ = client.communicate(timeout=max(0.1, ends_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        client.kill()
        client.communicate()
        return _Try(None, "ib_write_bw has not ended in time")
    gbits = average_gbits(said)
    if client.returncode != 0 or gbits is None:
        last = said.strip().splitlines()[-1:] or [f"exit code {client.returncode}"]
        return _Try(None, f"ib_write_bw: {last[0].strip()}")
    return _Try(gbits, "")
