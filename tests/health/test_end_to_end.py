"""From an edited file to the gang's next step, on a real cluster: three nodes of two GPUs, agents, arbiter, a gang.

Each node has its own NVML state file, InfiniBand tree and kernel log; what reads them is what reads the real ones.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import ray
from test_infiniband_source import sample

from captioned import captioned_images, tiny_run
from tidegate.arbiter.actor import start_arbiter
from tidegate.arbiter.client import NAMESPACE, ArbiterClient
from tidegate.arbiter.messages import ClaimSpec
from tidegate.data.prepare import prepare
from tidegate.gang.coordinator import JOURNAL, start_coordinator
from tidegate.gang.order import RunOrder, RunStatus
from tidegate.health.burn_in import is_untouched
from tidegate.health.drills import Drill
from tidegate.health.on_ray import start_agents
from tidegate.ids import NodeId, health_agent_name
from tidegate.json_lines import read_lines
from tidegate.ports import free_port
from tidegate.spec.policy import (
    ArbiterSpec,
    ClaimsSpec,
    GangSpec,
    HealthSpec,
    Policy,
    RuleOverride,
    ServingSpec,
    SourcesSpec,
    TemperatureRule,
)
from tidegate.testing import fake_nvml
from tidegate.testing.fake_nvml import NvmlState, gpus_of, uuid_of
from tidegate.testing.local_cluster import LocalCluster, Ports
from waiting import wait_until

pytestmark = pytest.mark.cluster

NAMES = ("node-a", "node-b", "node-c")
NODE_FOLDER = "TIDEGATE_TEST_NODE"
REPOSITORY = Path(__file__).parents[2]
TIDEGATE = Path(sys.executable).parent / "tidegate"


class Fleet:
    """A gang of four ranks that trains for as long as the test likes, on two of three nodes."""

    def __init__(self, cluster: LocalCluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        prepare(captioned_images(folder / "images", 20), folder / "shards", seed=0, rows_per_shard=10)
        policy = Policy(
            arbiter=ArbiterSpec(state_dir=str(folder / "state")),
            serving=ServingSpec(protect=False),
            claims=ClaimsSpec(dwell_s=0.0, min_run_s=0.0),
            # Other clusters and builds share this machine: a slow start or step is no fault here.
            gang=GangSpec(start_deadline_s=90.0, hang_floor_s=8.0, join_deadline_s=90.0),
            health=HealthSpec(
                period_s=0.2,
                nvml_library=str(folder / "nvml" / "libnvidia-ml.so.1"),
                state_dir=str(folder / "state" / "health"),
                sources=SourcesSpec(
                    ib_root=f"${NODE_FOLDER}/h100-host",
                    kmsg=f"${NODE_FOLDER}/kmsg",
                    dcgm_url=None,
                    disks=(str(folder),),
                ),
                temperature=TemperatureRule(release_after_s=0.5),
                rules={"ib_down": RuleOverride(for_s=0.5)},
            ),
        )
        ray.get(start_arbiter(policy).policy.remote())
        start_agents(policy)
        self.arbiter = ArbiterClient(timeout_s=20.0, patience_s=60.0)
        wait_until(lambda: len(self.tiers()) == 6, 60, "the agents of all nodes report")
        run = tiny_run(
            name="long",
            steps=1_000_000,
            checkpoint={"every_steps": 20, "ram_every_steps": 5, "keep": 2},
            # So small that it can't diverge, however long it goes on.
            optimizer={"lr": 1e-5, "warmup_steps": 2, "decay_steps": 3},
        )
        order = RunOrder(
            claim=ClaimSpec(name="long", claim_class="pretrain", max_gpus=4, min_gpus=2, owner="test"),
            config=run,
            data_dir=str(folder / "shards"),
            run_dir=str(folder / "run"),
        )
        self.coordinator: Any = start_coordinator(order)
        ray.get(self.coordinator.start.remote(order))

    # What is done to it

    def gpu_state(self, gpu: str) -> tuple[NvmlState, int]:
        name, index = next((name, index) for name in NAMES for index in (0, 1) if uuid_of(name, index) == gpu)
        return NvmlState(self.folder / name / "nvml.state"), index

    def set(self, gpu: str, key: str, value: object) -> None:
        state, index = self.gpu_state(gpu)
        state.set(index, key, value)

    def kernel_says(self, name: str, line: str) -> None:
        with (self.folder / name / "kmsg").open("a", encoding="utf-8") as log:
            log.write(f"{line}\n")

    # What is seen of it

    def look(self) -> dict[str, Any]:
        return asyncio.run(self.arbiter.status())

    def tiers(self) -> dict[str, str]:
        """By GPU: those of nodes whose agents report."""
        nodes = (node for node in self.look()["nodes"] if not node["source_error"])
        return {gpu["gpu"]: gpu["tier"] for node in nodes for gpu in node["gpus"]}

    def gang(self) -> dict[str, Any]:
        return next(iter(self.look()["gangs"]), {})

    def status(self) -> RunStatus:
        status: RunStatus = ray.get(self.coordinator.status.remote())
        assert status.state != "failed", status.reason
        return status

    def node_id(self, name: str) -> str:
        return next(node["node"] for node in self.look()["nodes"] if node["name"] == name)

    def node_of(self, gpu: str) -> str:
        return next(n["name"] for n in self.look()["nodes"] if gpu in [seen["gpu"] for seen in n["gpus"]])

    def notes(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in read_lines(self.folder / "run" / JOURNAL) if line["kind"] == kind]

    def commits(self) -> int:
        return len(list(read_lines(self.folder / "run" / "checkpoints.jsonl")))

    def wait_for_commit(self) -> None:
        before = self.commits()
        wait_until(lambda: self.commits() > before, 60, "a checkpoint")

    def wait_for_ranks(self, *, without: str = "", ranks: int, after: int) -> None:
        """Until a later generation has made its first step with so many ranks, none on that GPU."""

        def stepping() -> bool:
            status, gang = self.status(), self.gang()
            newer = status.generation > after and status.state == "running" and status.world_size == ranks
            return newer and len(gang["gpus"]) == ranks and without not in gang["gpus"]

        wait_until(stepping, 120, f"{ranks} ranks make a step without {without or 'anyone'}")

    def metrics(self) -> str:
        texts = []
        for node in ray.nodes():
            texts.append(httpx.get(f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics").text)
        return "\n".join(texts)

    def wait_for_metric(self, pattern: str) -> None:
        wait_until(lambda: re.search(pattern, self.metrics(), re.MULTILINE), 60, f"{pattern} among Ray's metrics")

    def why(self, subject: str) -> str:
        lines = asyncio.run(self.arbiter.why(subject))
        return "\n".join(f"{line.kind}: {line.reason}" for line in lines)

    def command(self, *arguments: str) -> str:
        environment = self.cluster.client_environment()
        done = subprocess.run(
            [str(TIDEGATE), *arguments], env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("e2e")
    (folder / "nvml").mkdir()
    fake_nvml.build(folder / "nvml")
    for name in NAMES:
        sample("h100-host", folder / name)
        (folder / name / "kmsg").touch()
        NvmlState(folder / name / "nvml.state", gpus_of(name, 2))
    cluster = LocalCluster(
        ports=Ports(gcs=free_port(), dashboard=free_port()),
        gpus_per_node=(2, 2, 2),
        head_cpus=2,
        node_cpus=1,
        environment={"OMP_NUM_THREADS": "1", "RAY_metrics_report_interval_ms": "1000"},
        node_environment=[
            {fake_nvml.STATE_VARIABLE: str(folder / name / "nvml.state"), NODE_FOLDER: str(folder / name)}
            for name in NAMES
        ],
    )
    with cluster:
        ray.init(address=cluster.address, namespace=NAMESPACE, log_to_driver=False)
        try:
            fleet = Fleet(cluster, folder)
            fleet.wait_for_ranks(ranks=4, after=0)
            yield fleet
        finally:
            ray.shutdown()


def test_a_hot_gpu_leaves_at_once_and_the_brake_holds_a_second_one(fleet: Fleet) -> None:
    """GPU now: state file -> verdict -> its rank gone -> next step -> metric, why. Then the brake; then both cool."""
    fleet.wait_for_commit()
    gang = fleet.gang()
    hot, other = gang["gpus"][0], gang["gpus"][3]
    for name in ("rank_step_compute_seconds", "rank_straggler_score"):
        fleet.wait_for_metric(rf'^ray_{name}{{.*gpu_uuid="{hot}".*job="long".*}} [0-9.e-]+$')
    assert fleet.node_of(hot) != fleet.node_of(other)
    rank = psutil.Process(gang["pids"][0])
    fleet.set(hot, "temp", 79)
    fleet.wait_for_ranks(without=hot, ranks=3, after=1)
    assert not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE
    assert fleet.tiers()[hot] == "serve", "one hot GPU still answers requests"
    assert fleet.notes("group_restarted") == []
    said = fleet.why(hot)
    assert re.search("impose: .*79 °C", said), said
    assert re.search("evict: .*79 °C", said), said
    fleet.wait_for_metric(rf'^ray_health_verdict{{.*rule="temperature",.*subject="{hot}".*}} 1')
    fleet.wait_for_metric(r'^ray_health_evictions_total{.*rule="temperature".*} 1')

    fleet.set(other, "temp", 80)
    wait_until(lambda: [f["gpu"] for f in fleet.look()["held_back"]] == [other], 30, "the brake holds the second one")
    assert other in fleet.gang()["gpus"]
    assert "fleet brake on rule temperature" in fleet.why(other)
    fleet.wait_for_metric(r"^ray_tidegate_findings_held_back{.*} 1")

    fleet.set(other, "temp", 60)
    wait_until(lambda: not fleet.look()["held_back"], 30, "what has cooled is not held back any more")
    fleet.set(hot, "temp", 60)
    fleet.wait_for_ranks(ranks=4, after=2)
    assert re.search("impose: temperature has ended, a burn-in is due", fleet.why(hot)), fleet.why(hot)
    agent: Any = ray.get_actor(health_agent_name(NodeId(fleet.node_id(fleet.node_of(hot)))), namespace=NAMESPACE)
    assert "its burn-in passed" in [finding.text for finding in ray.get(agent.seen.remote()).findings]


def test_a_row_to_be_remapped_leaves_with_the_next_checkpoint(fleet: Fleet) -> None:
    """GPU next checkpoint: a line of the kernel log -> verdict -> it trains on, saves, and is left out; saved first."""
    fleet.wait_for_commit()
    gang, before = fleet.gang(), fleet.status()
    out = gang["gpus"][1]
    name = fleet.node_of(out)
    _, index = fleet.gpu_state(out)
    fleet.kernel_says(name, f"NVRM: Xid (PCI:0000:{0x18 + index:02x}:00): 63, Row Remapper: New row marked")
    fleet.wait_for_ranks(without=out, ranks=3, after=before.generation)
    assert fleet.notes("planned")[-1]["reason"] == "the grant lists other GPUs"
    lost = fleet.notes("first_step")[-1]["data"]["steps_lost"]
    assert lost < 20, "it left with a checkpoint: only what ran while that was written is done again"
    assert re.search("impose: XID 63", fleet.why(out)), fleet.why(out)
    fleet.wait_for_metric(rf'^ray_health_verdict{{.*rule="xid_row_remap",.*subject="{out}".*}} 1')


def test_a_node_whose_port_is_down_is_swapped_and_still_serves(fleet: Fleet) -> None:
    """Node now, tier serve: a port's state file -> verdict on the node -> the gang stands on the spare one."""
    fleet.wait_for_commit()
    gang, before = fleet.gang(), fleet.status()
    # The node with one rank: the other alone has not the run's most.
    out = next(fleet.node_of(gpu) for gpu in gang["gpus"])
    port = fleet.folder / out / "h100-host" / "mlx5_0" / "ports" / "1"
    (port / "state").write_text("1: DOWN\n")
    (port / "phys_state").write_text("3: Disabled\n")

    def elsewhere() -> bool:
        status, seen = fleet.status(), fleet.gang()
        gone = out not in {fleet.node_of(gpu) for gpu in seen["gpus"]}
        return status.generation > before.generation and status.state == "running" and bool(seen["gpus"]) and gone

    wait_until(elsewhere, 120, "the gang runs elsewhere")
    assert {fleet.tiers()[uuid_of(out, index)] for index in (0, 1)} == {"serve"}
    assert re.search("impose: mlx5_0/1.*down", fleet.why(fleet.node_id(out))), fleet.why(fleet.node_id(out))
    fleet.wait_for_metric(r'^ray_health_verdict{.*rule="ib_down".*} 1')
    shown = json.loads(fleet.command("why", fleet.node_id(out), "--json"))
    assert any("mlx5_0/1" in line["reason"] for line in shown)


def test_drills(fleet: Fleet) -> None:
    """Each is tried dry, and then for true: on the node that has left, but for the hang, which needs a rank."""
    gang = fleet.gang()
    out = next(name for name in NAMES if name not in {fleet.node_of(gpu) for gpu in gang["gpus"]})
    here = fleet.node_id(out)
    agent: Any = ray.get_actor(health_agent_name(NodeId(here)), namespace=NAMESPACE)
    rules = {
        Drill.HOT_GPU: "temperature",
        Drill.XID: "xid_off_the_bus",
        Drill.IB_FLAP: "ib_flap_seen_fast",
        Drill.NVML_HANG: "nvml_silent",
    }

    def imposed() -> int:
        """By drills; the journal keeps those that have ended too."""
        return len(re.findall(r"^impose: .*a drill", fleet.why(here), re.MULTILINE))

    for drill, rule in rules.items():
        subject = "mlx5_1/1" if drill is Drill.IB_FLAP else None
        dry = ray.get(agent.drill.remote(drill, subject, True))
        assert rule in [verdict.rule for verdict in dry]
        before = imposed()
        assert rule in [verdict.rule for verdict in ray.get(agent.drill.remote(drill, subject, False))]
        wait_until(lambda before=before: imposed() > before, 30, f"{drill} stands in the arbiter's book")  # type: ignore[misc]


def test_a_hang_tells_where_all_ranks_stand_and_starts_anew(fleet: Fleet) -> None:
    """`tidegate drill hang`: a rank is stopped for real -> hung -> all stacks, before the restart -> why shows them."""
    fleet.wait_for_commit()
    gang, before = fleet.gang(), fleet.status()
    name = fleet.node_of(gang["gpus"][0])
    stopped = psutil.Process(gang["pids"][0])
    assert "would be stopped" in fleet.command(
        "drill", "hang", "--node", name, "--subject", gang["gpus"][0], "--dry-run"
    )
    assert stopped.status() != psutil.STATUS_STOPPED
    said = fleet.command("drill", "hang", "--node", name, "--subject", gang["gpus"][0])
    assert f"process {stopped.pid}" in said
    fleet.wait_for_ranks(ranks=before.world_size, after=before.generation)
    hung = fleet.notes("hung")
    assert hung, [(line["kind"], line["reason"]) for line in read_lines(fleet.folder / "run" / JOURNAL)][-12:]
    assert hung[-1]["data"]["suspects"][0]["gpu"] == gang["gpus"][0]
    folder = fleet.folder / "run" / "stacks"
    kept = {path.name: path.read_text() for path in folder.glob(f"generation-{before.generation}-*")}
    assert set(kept) == {f"generation-{before.generation}-rank-{rank}.txt" for rank in range(before.world_size)}
    assert all("_train" in text for text in kept.values()), kept
    shown = fleet.command("why", "long")
    assert f"rank 0 on {gang['gpus'][0]} stood here" in shown
    assert "tidegate/train/loop.py" in shown


def test_the_arbiters_successor_goes_on_with_what_stands(fleet: Fleet) -> None:
    before = {(q["node"], q["gpu"], q["rule"]) for q in fleet.look()["quarantines"]}
    arbiter: Any = ray.get_actor("arbiter", namespace=NAMESPACE)
    process = psutil.Process(ray.get(arbiter.__ray_call__.remote(lambda _: os.getpid())))
    process.kill()
    wait_until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE, 10, "it is gone")
    wait_until(lambda: len(fleet.tiers()) == 6, 60, "all agents report to the next one")
    after = {(q["node"], q["gpu"], q["rule"]) for q in fleet.look()["quarantines"]}
    assert after == before


def test_nodes_are_burned_in_by_a_job_and_come_back(fleet: Fleet) -> None:
    """`ray job submit -- python jobs/burn_in.py`: two nodes, each by itself and as a pair; then pardoned."""
    ray.get(fleet.coordinator.stop.remote("the test is over"))
    wait_until(lambda: ray.get(fleet.coordinator.status.remote()).over, 60, "the run is over")
    for name in NAMES:
        port = fleet.folder / name / "h100-host" / "mlx5_0" / "ports" / "1"
        (port / "state").write_text("4: ACTIVE\n")
        (port / "phys_state").write_text("5: LinkUp\n")
    out = sorted({q["node"] for q in fleet.look()["quarantines"]})
    names = [next(n["name"] for n in fleet.look()["nodes"] if n["node"] == node) for node in out][:1]
    names.append(next(name for name in NAMES if name not in names))
    job = (sys.executable, str(REPOSITORY / "jobs" / "burn_in.py"), "--nodes", *names, "--return")
    done = subprocess.run(
        [str(TIDEGATE.parent / "ray"), "job", "submit", "--", *job, "--signed-by", "the test"],
        env=fleet.cluster.client_environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for name in names:
        record = json.loads((fleet.folder / "state" / "burn-in" / f"{name}.json").read_text())
        assert record["passed"], record
        assert record["signed_off"]["by"] == "the test"
        assert is_untouched(record)
        assert {"gemm_tflops", "bits", "all_reduce_in_node_gbytes_per_s", "all_reduce_of_pair_gbytes_per_s"} <= {
            check["name"] for check in record["checks"]
        }
        assert "burn-in passed" in fleet.why(fleet.node_id(name))
        assert {fleet.tiers()[uuid_of(name, index)] for index in (0, 1)} == {"gang"}, fleet.look()["quarantines"]
