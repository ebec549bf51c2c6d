"""What an InfiniBand port carries to itself, by perftest's `ib_write_bw`, where it is installed."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from tidegate.arbiter.messages import Check
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


def floor_gbits(rate_gbits: float) -> float:
    return FLOORS_GBITS.get(rate_gbits, FLOOR_SHARE * rate_gbits)


def average_gbits(text: str) -> float | None:
    """The average bandwidth in what `ib_write_bw --report_gbits` prints; None where it tells none."""
    found = _ROW.findall(text)
    return float(found[-1]) if found else None


def loopbacks(program: str, rates_gbits: Mapping[str, float], deadline_s: float = DEADLINE_S) -> list[Check]:
    """A check for each port, `mlx5_0/1`, with its rate in Gbit/s. All at once; blocks for at most `deadline_s`."""
    ends_s = time.monotonic() + deadline_s
    with ThreadPoolExecutor(max(len(rates_gbits), 1)) as threads:
        return list(threads.map(lambda port: _check(program, port, rates_gbits[port], ends_s), rates_gbits))


def _check(program: str, port: str, rate_gbits: float, ends_s: float) -> Check:
    gbits, why = _measured(program, port, ends_s)
    least = floor_gbits(rate_gbits)
    text = why if gbits is None else f"{gbits:.1f} Gbit/s, at least {least:g}"
    good = gbits is not None and gbits >= least
    return Check(name="InfiniBand loopback", subject=port, passed=good, text=text)


def _measured(program: str, port: str, ends_s: float) -> tuple[float | None, str]:
    """Gbit/s, or why there are none."""
    device, _, index = port.partition("/")
    options = ["-d", device, "-i", index or "1", "-p", str(free_port()), "-D", str(SECONDS), "-F", "--report_gbits"]
    server = _popen([program, *options])
    try:
        for _ in range(TRIES):
            time.sleep(SERVER_LISTENS_S)
            gbits, why = _end(_popen([program, *options, "127.0.0.1"]), ends_s)
            if gbits is not None or "connect" not in why or time.monotonic() > ends_s:
                break
        return gbits, why
    finally:
        server.kill()
        server.communicate()


def _popen(command: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )


def _end(client: subprocess.Popen[str], ends_s: float) -> tuple[float | None, str]:
    try:
        said, _ = client.communicate(timeout=max(0.1, ends_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        client.kill()
        client.communicate()
        return None, "ib_write_bw has not ended in time"
    gbits = average_gbits(said)
    if client.returncode != 0 or gbits is None:
        last = said.strip().splitlines()[-1:] or [f"exit code {client.returncode}"]
        return None, f"ib_write_bw: {last[0].strip()}"
    return gbits, ""
