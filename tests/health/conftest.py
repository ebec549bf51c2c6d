from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tidegate.health.sources.nvml import NvmlSource
from tidegate.ids import NodeId
from tidegate.testing import fake_nvml
from tidegate.testing.fake_clock import FakeClock
from tidegate.testing.fake_nvml import NvmlState, gpus_of


@pytest.fixture(scope="session")
def node() -> NodeId:
    return NodeId("a1" * 28)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for the whole process: pynvml keeps the first library that it is given."""
    return fake_nvml.build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NvmlState:
    """Four healthy H100s. The fake asks for the variable at each call, so each test has its own file."""
    path = tmp_path / "nvml.state"
    monkeypatch.setenv(fake_nvml.STATE_VARIABLE, str(path))
    return NvmlState(path, gpus_of("node-a", 4))


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def source(library: Path, state: NvmlState, node: NodeId, clock: FakeClock) -> Iterator[NvmlSource]:
    source = NvmlSource(str(library), node=node, clock=clock)
    yield source
    source.close()
