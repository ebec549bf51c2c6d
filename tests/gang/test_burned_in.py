"""`health.burn_in.before_gang` on a real cluster: a gang's GPUs are examined before it starts, and one fails."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from captioned import captioned_images, tiny_run
from tidegate.arbiter.actor import start_arbiter
from tidegate.arbiter.client import NAMESPACE, ArbiterClient
from tidegate.arbiter.messages import ClaimSpec
from tidegate.data.prepare import prepare
from tidegate.gang.coordinator import JOURNAL, start_coordinator
from tidegate.gang.order import RunOrder, RunStatus
from tidegate.health.on_ray import start_agents
from tidegate.json_lines import read_lines
from tidegate.ports import free_port
from tidegate.spec.policy import ArbiterSpec, BurnInSpec, GangSpec, HealthSpec, Policy, ServingSpec, SourcesSpec
from tidegate.testing import fake_nvml
from tidegate.testing.fake_nvml import NvmlState, gpus_of, uuid_of
from tidegate.testing.local_cluster import LocalCluster, Ports
from waiting import wait_until

pytestmark = pytest.mark.cluster

NODE = "node-a"
GPUS = 3
BAD = uuid_of(NODE, 1)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    fake_nvml.build(tmp_path)
    # A setting that no rule watches: only who looks for it finds it.
    NvmlState(tmp_path / "nvml.state", gpus_of(NODE, GPUS)).set(1, "ecc_mode", "0")
    local = LocalCluster(
        ports=Ports(gcs=free_port(), dashboard=free_port()),
        gpus_per_node=(GPUS,),
        head_cpus=2,
        node_cpus=1,
        environment={"OMP_NUM_THREADS": "1"},
        node_environment=[{fake_nvml.STATE_VARIABLE: str(tmp_path / "nvml.state")}],
    )
    with local:
        ray.init(address=local.address, namespace=NAMESPACE, log_to_driver=False)
        try:
            yield local
        finally:
            ray.shutdown()


def test_a_gang_starts_without_the_gpu_that_fails_and_examines_nobody_again(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    prepare(captioned_images(tmp_path / "images", 20), tmp_path / "shards", seed=0, rows_per_shard=10)
    policy = Policy(
        arbiter=ArbiterSpec(state_dir=str(tmp_path / "state")),
        serving=ServingSpec(protect=False),
        gang=GangSpec(start_deadline_s=90.0, join_deadline_s=90.0),
        health=HealthSpec(
            nvml_library=str(tmp_path / fake_nvml.LIBRARY),
            state_dir=str(tmp_path / "state" / "health"),
            sources=SourcesSpec(ib_root=str(tmp_path / "none"), kmsg=None, dcgm_url=None, disks=(str(tmp_path),)),
            burn_in=BurnInSpec(before_gang=True),
        ),
    )
    ray.get(start_arbiter(policy).policy.remote())
    start_agents(policy)
    arbiter = ArbiterClient(timeout_s=20.0)

    def look() -> dict[str, Any]:
        return asyncio.run(arbiter.status())

    wait_until(
        lambda: sum(len(node["gpus"]) for node in look()["nodes"] if not node["source_error"]) == GPUS, 60, "GPUs"
    )
    order = RunOrder(
        claim=ClaimSpec(name="fit", claim_class="pretrain", max_gpus=GPUS, min_gpus=2, owner="test"),
        config=tiny_run(name="fit", steps=1_000_000, checkpoint={"every_steps": 20, "ram_every_steps": 5, "keep": 2}),
        data_dir=str(tmp_path / "shards"),
        run_dir=str(tmp_path / "run"),
    )
    coordinator: Any = start_coordinator(order)
    ray.get(coordinator.start.remote(order))

    def status() -> RunStatus:
        found: RunStatus = ray.get(coordinator.status.remote())
        assert found.state != "failed", found.reason
        return found

    def said() -> list[str]:
        return [line["data"]["state"] for line in read_lines(tmp_path / "run" / JOURNAL) if line["kind"] == "burn_in"]

    wait_until(lambda: status().state == "running", 120, "the gang runs")
    assert status().world_size == GPUS - 1
    gang = look()["gangs"][0]
    assert BAD not in gang["gpus"]
    # The two that are left are examined without it, to the end.
    assert said() == ["began", "failed", "began", "passed"]
    assert any(BAD in str(row) and "ECC" in str(row) for row in look()["quarantines"])
    assert any("burn-in before fit failed" in line.reason for line in asyncio.run(arbiter.why(BAD)))

    before = status().generation
    os.kill(gang["pids"][0], signal.SIGKILL)
    wait_until(lambda: status().generation > before and status().state == "running", 60, "it goes on")
    assert len(said()) == 4, "a restart in place examines nobody"
    ray.get(coordinator.stop.remote("the test is over"))
