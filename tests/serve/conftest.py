"""One stand-in provider for all tests of the room."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from stand_in import StandIn, answers

from tidegate.ports import free_port
from waiting import wait_until


@pytest.fixture(scope="session")
def stand_in_process() -> Iterator[StandIn]:
    port = free_port()
    command = [sys.executable, "-m", "tidegate.testing.standin_provider", "--port", str(port), "--latency-s", "0.02"]
    process = subprocess.Popen(command)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: process.poll() is not None or answers(url), 20, "the stand-in provider to answer")
        assert process.poll() is None
        yield StandIn(url)
    finally:
        process.terminate()
        process.wait(10)


@pytest.fixture
def stand_in(stand_in_process: StandIn) -> StandIn:
    """The stand-in with all faults taken back. Its counts go on over tests: compare with those before."""
    stand_in_process.control(
        fault="status",
        times=0,
        latency_s=0.02,
        latency_sigma=0.0,
        slots=8,
        queue_max=1000,
        forget=True,
        key="",
        files_at="",
        refuse_response_format=False,
    )
    return stand_in_process
