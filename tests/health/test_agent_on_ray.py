"""The agent as a Ray actor, on a real cluster with the fake library."""

from __future__ import annotations

import re
import shutil
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util import list_named_actors

from tidegate.arbiter.client import ACTOR_NAME, NAMESPACE
from tidegate.arbiter.messages import Action, HealthReport
from tidegate.health.on_ray import ensure_agent, start_agents
from tidegate.ids import NodeId, health_agent_name
from tidegate.spec.policy import HealthSpec, Policy
from tidegate.testing import fake_nvml
from tidegate.testing.fake_nvml import NvmlState, gpus_of, uuid_of
from waiting import wait_until

pytestmark = pytest.mark.cluster


@ray.remote(num_cpus=0)
class Listener:
    """Stands where the arbiter stands and keeps the newest report."""

    def __init__(self) -> None:
        self._newest: HealthReport | None = None

    async def report_health(self, report: HealthReport) -> dict[str, str]:
        self._newest = report
        return {}

    async def newest(self) -> HealthReport | None:
        return self._newest


class Cluster:
    def __init__(self, library: Path, folder: Path, state: NvmlState) -> None:
        self.state = state
        self.node = NodeId(ray.nodes()[0]["NodeID"])
        health = HealthSpec(period_s=0.2, nvml_library=str(library), state_dir=str(folder))
        self.policy = Policy(health=health)
        self.listener: Any = self.listen()

    def listen(self) -> Any:
        return Listener.options(name=ACTOR_NAME, namespace=NAMESPACE, lifetime="detached").remote()

    def newest(self) -> HealthReport | None:
        report: HealthReport | None = ray.get(self.listener.newest.remote())
        return report

    def temperatures(self) -> list[float | None]:
        report = self.newest()
        return [gpu.temperature_celsius for gpu in report.gpus] if report is not None else []

    def verdicts(self) -> list[tuple[str, Action, str | None]]:
        report = self.newest()
        return [(v.rule, v.action, v.gpu) for v in report.verdicts] if report is not None else []

    def metrics(self) -> str:
        port = ray.nodes()[0]["MetricsExportPort"]
        with urllib.request.urlopen(f"http://{ray.util.get_node_ip_address()}:{port}/metrics") as answer:
            text: str = answer.read().decode()
        return text


@pytest.fixture(scope="module")
def cluster(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("health")
    state = NvmlState(folder / "nvml.state", gpus_of("node-a", 2))
    # Not under pytest's folder: paths of Ray's unix sockets may have 107 characters at most.
    temp_dir = tempfile.mkdtemp(prefix="tg-")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(fake_nvml.STATE_VARIABLE, str(state.path))
        environment.setenv("RAY_AUTH_MODE", "disabled")
        # The default is 30 s, which a machine that is busy with other clusters may need for a raylet alone.
        environment.setenv("RAY_raylet_start_wait_time_s", "120")
        try:
            ray.init(
                address="local",
                num_cpus=2,
                num_gpus=2,
                include_dashboard=False,
                log_to_driver=False,
                _temp_dir=temp_dir,
                _system_config={"metrics_report_interval_ms": 1000},
            )
            yield Cluster(library, folder, state)
        finally:
            ray.shutdown()
            shutil.rmtree(temp_dir, ignore_errors=True)


def test_the_agents_life(cluster: Cluster) -> None:
    """One story, as each step needs the one before: start, hot GPU, arbiter's death, agent's death."""
    start_agents(cluster.policy)
    start_agents(cluster.policy)
    wait_until(lambda: cluster.temperatures() == [61.0, 61.0], 30, "a report with both GPUs")
    named = [actor["name"] for actor in list_named_actors(all_namespaces=True) if actor["namespace"] == NAMESPACE]
    assert sorted(named) == [ACTOR_NAME, health_agent_name(cluster.node)]

    cluster.state.set(1, "temp", 79)
    evicted = [("temperature", Action.EVICT_GPU, uuid_of("node-a", 1))]
    wait_until(lambda: cluster.verdicts() == evicted, 30, "the verdict on the hot GPU")

    hot = f'ray_gpu_temperature_celsius{{.*gpu_uuid="{uuid_of("node-a", 1)}".*}} 79'
    for series in (hot, r"ray_gpu_tensor_active_ratio{.*} 0.415", "ray_health_tick_seconds{"):
        wait_until(lambda pattern=series: re.search(pattern, cluster.metrics()), 30, f"{series} among Ray's metrics")

    ray.kill(cluster.listener)
    cluster.listener = cluster.listen()
    wait_until(lambda: cluster.verdicts() == evicted, 30, "a report to the next arbiter")

    # 72 °C is below the limit and above the release: only what the first agent remembered can make this a verdict.
    cluster.state.set(1, "temp", 72)
    wait_until(lambda: cluster.temperatures() == [61.0, 72.0], 30, "the cooler GPU")
    ray.kill(ensure_agent(cluster.node, cluster.policy), no_restart=False)
    cluster.state.set(0, "temp", 60)
    wait_until(lambda: cluster.temperatures() == [60.0, 72.0], 30, "a report of the restarted agent")
    assert cluster.verdicts() == evicted

    its_series = f'ray_gpu_temperature_celsius{{.*gpu_uuid="{uuid_of("node-a", 1)}"'
    wait_until(lambda: re.search(f"{its_series}.*72", cluster.metrics()), 30, "the metrics of the restarted agent")
    cluster.state.set(1, "error", 15)
    wait_until(lambda: len(cluster.verdicts()) == 2, 30, "the verdict on the lost GPU")
    assert cluster.temperatures() == [60.0, None]
    wait_until(lambda: not re.search(its_series, cluster.metrics()), 30, "its temperature to leave Ray's metrics")
