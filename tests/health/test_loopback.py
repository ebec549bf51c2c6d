"""A port's loopback by ib_write_bw: a stand-in prints what perftest prints, and serves and connects as it does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tidegate.health.loopback import average_gbits, floor_gbits, loopbacks

# perftest 24.01, `ib_write_bw -d mlx5_0 -F -D 3 --report_gbits`, shortened in its head.
PRINTED = """\
---------------------------------------------------------------------------------------
                    RDMA_Write BW Test
 Dual-port       : OFF\t\tDevice         : mlx5_0
 Number of qps   : 1\t\tTransport type : IB
 Connection type : RC\t\tUsing SRQ      : OFF
 Link type       : IB
---------------------------------------------------------------------------------------
 local address: LID 0x05 QPN 0x0127 PSN 0xd0fd14 RKey 0x1fff00 VAddr 0x007f6e7a1a0000
---------------------------------------------------------------------------------------
 #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]
 65536      2244306          0.00               {0} \t\t   0.748102
---------------------------------------------------------------------------------------
"""
PROGRAM = """\
#!{python}
import socket, sys, threading
words = sys.argv[1:]
number, device = int(words[words.index("-p") + 1]), words[words.index("-d") + 1]
if words[-1] != "127.0.0.1":
    with socket.create_server(("127.0.0.1", number)) as server:
        server.accept()[0].recv(1)
    sys.exit(0)
if device == "mlx5_3":
    threading.Event().wait(60)
if device == "mlx5_4":
    sys.exit("Couldn't create QP: Cannot allocate memory")
with socket.create_connection(("127.0.0.1", number)):
    print({printed!r}.format({{"mlx5_0": "392.21", "mlx5_1": "371.90"}}.get(device, "196.00")))
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "ib_write_bw"
    path.write_text(PROGRAM.format(python=sys.executable, printed=PRINTED))
    path.chmod(0o755)
    return str(path)


def test_each_port_is_held_to_its_rate(program: str) -> None:
    checks = loopbacks(program, {"mlx5_0/1": 400.0, "mlx5_1/1": 400.0, "mlx5_2/1": 200.0})
    assert [(check.subject, check.passed, check.text) for check in checks] == [
        ("mlx5_0/1", True, "392.2 Gbit/s, at least 380"),
        ("mlx5_1/1", False, "371.9 Gbit/s, at least 380"),
        ("mlx5_2/1", True, "196.0 Gbit/s, at least 180"),
    ]


def test_one_that_hangs_or_fails_says_so(program: str) -> None:
    hangs, fails = loopbacks(program, {"mlx5_3/1": 400.0, "mlx5_4/1": 400.0}, deadline_s=3.0)
    assert not hangs.passed
    assert hangs.text == "ib_write_bw has not ended in time"
    assert not fails.passed
    assert "Cannot allocate memory" in fails.text


def test_what_perftest_prints_is_read() -> None:
    assert average_gbits(PRINTED.format("391.98")) == 391.98
    assert average_gbits("Couldn't connect to 127.0.0.1:18515") is None
    assert (floor_gbits(400), floor_gbits(200), floor_gbits(100)) == (380, 180, 90)
