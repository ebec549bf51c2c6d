"""Seven traps of Ray 2.60 that our gangs must not step into, each shown on one small cluster: three nodes of two
logical GPUs, no Serve. Each test fails where its remedy, named in its docstring, is taken away.

The eighth, drains that wait out their deadline, is C038's. The hooks that the remedies hang on: `test_trainer.py`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import ray._private.worker
from ray.util.state import list_actors

from captioned import captioned_images, tiny_run
from tidegate.arbiter.actor import start_arbiter
from tidegate.arbiter.client import NAMESPACE, ArbiterClient
from tidegate.arbiter.messages import ClaimSpec
from tidegate.checkpoint.restore import newest_good
from tidegate.data.prepare import prepare
from tidegate.gang.coordinator import JOURNAL, start_coordinator
from tidegate.gang.host import host_name
from tidegate.gang.kept import KEPT
from tidegate.gang.order import RunOrder, RunStatus
from tidegate.ids import NodeId, coordinator_name
from tidegate.json_lines import read_lines
from tidegate.ports import free_port
from tidegate.processes import AGENT_MARK
from tidegate.spec.policy import ArbiterSpec, ClaimsSpec, Policy, ServingSpec
from tidegate.testing.local_cluster import LocalCluster, Ports, marked_processes
from tidegate.train.config import RunConfig
from waiting import wait_until

pytestmark = pytest.mark.cluster

SNAPSHOT = "checkpoint_manager_snapshot.json"
"""Ray Train's own registry of checkpoints, in each experiment's folder."""
UNREGISTERED_STEPS = 7
"""Steps whose checkpoint was made where Ray Train never saw it."""
PREEMPTION = 2
"""Ray's `DrainNodeReason`: the one that is never rejected."""


@ray.remote(num_cpus=0, num_gpus=1)
class Stranger:
    """Holds a GPU, and is none of the arbiter's."""

    def here(self) -> bool:
        return True


@dataclass
class Room:
    cluster: LocalCluster
    folder: Path
    arbiter: ArbiterClient

    def look(self) -> dict[str, Any]:
        return asyncio.run(self.arbiter.status())

    def names(self) -> dict[str, NodeId]:
        return {row["Labels"]["tidegate/name"]: NodeId(row["NodeID"]) for row in gpu_nodes()}

    def actor_classes(self) -> set[str]:
        """Of the actors that are alive."""
        return {
            row.class_name for row in list_actors(address=self.cluster.dashboard_url, filters=[("state", "=", "ALIVE")])
        }

    def groups(self) -> dict[str, str]:
        """Placement group id -> state, without those that are gone."""
        table = ray.util.placement_group_table()
        return {key: row["state"] for key, row in table.items() if row["state"] != "REMOVED"}


class Run:
    """A gang that trains a tiny network for as long as the tests like."""

    def __init__(self, room: Room, name: str, *, max_gpus: int, min_gpus: int) -> None:
        self.room, self.name, self.run_dir = room, name, room.folder / name
        self.config = config(name)
        claim = ClaimSpec(name=name, claim_class="pretrain", max_gpus=max_gpus, min_gpus=min_gpus, owner="test")
        self.order = RunOrder(
            claim=claim, config=self.config, data_dir=str(room.folder / "shards"), run_dir=str(self.run_dir)
        )
        self.coordinator: Any = None

    def start(self) -> None:
        self.coordinator = start_coordinator(self.order)
        ray.get(self.coordinator.start.remote(self.order))

    def status(self) -> RunStatus:
        status: RunStatus = ray.get(self.coordinator.status.remote())
        return status

    def notes(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in read_lines(self.run_dir / JOURNAL) if line["kind"] == kind]

    def kept(self) -> dict[str, Any]:
        kept: dict[str, Any] = json.loads((self.run_dir / KEPT).read_text())
        return kept["gang"]

    def claim(self) -> dict[str, Any]:
        row: dict[str, Any] = next(row for row in self.room.look()["claims"] if row["claim"] == self.name)
        return row

    def gang(self) -> dict[str, Any]:
        gang: dict[str, Any] = next(gang for gang in self.room.look()["gangs"] if gang["claim"] == self.name)
        return gang

    def wait_running(self, *, after: int, ranks: int, deadline_s: float) -> None:
        """A generation later than `after` makes steps with so many ranks."""

        def there() -> bool:
            status = self.status()
            assert status.state not in ("failed", "finished"), status.reason
            return status.state == "running" and status.generation > after and status.world_size == ranks

        wait_until(there, deadline_s, f"generation {after + 1} or later runs with {ranks} ranks")

    def wait_commit(self) -> None:
        """A generation that ends before it commits counts towards the guard against endless restarts."""
        before = self.committed()
        wait_until(lambda: self.committed() > before, 60, "a checkpoint is committed")

    def committed(self) -> int:
        return max((line["step"] for line in read_lines(self.run_dir / "checkpoints.jsonl")), default=-1)

    def kill_controller(self) -> None:
        """SIGKILL to the process in which Ray Train's controller runs."""
        host = ray.get_actor(host_name(self.name, self.kept()["train"]), namespace=NAMESPACE)
        os.kill(ray.get(host.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)

    def group_id(self) -> str:
        name = self.kept()["grant"]["placement_group"]
        table = ray.util.placement_group_table()
        return next(key for key, row in table.items() if row["name"] == name and row["state"] != "REMOVED")


def config(name: str, steps: int = 1_000_000) -> RunConfig:
    return tiny_run(name=name, steps=steps, checkpoint={"every_steps": 20, "keep": 2})


def gpu_nodes() -> list[dict[str, Any]]:
    return [row for row in ray.nodes() if row["Alive"] and row["Resources"].get("GPU", 0) >= 1]


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    folder = tmp_path_factory.mktemp("traps")
    prepare(captioned_images(folder / "images", 20), folder / "shards", seed=0, rows_per_shard=10)
    ports = Ports(gcs=free_port(), dashboard=free_port())
    local = LocalCluster(
        ports=ports,
        gpus_per_node=(2, 2, 2),
        head_cpus=2,
        node_cpus=1,
        environment={"OMP_NUM_THREADS": "1"},
    )
    with local:
        ray.init(address=local.address, namespace=NAMESPACE, log_to_driver=False)
        policy = Policy(
            arbiter=ArbiterSpec(state_dir=str(folder / "state")),
            serving=ServingSpec(protect=False),
            claims=ClaimsSpec(dwell_s=0.0),
        )
        ray.get(start_arbiter(policy).policy.remote())
        try:
            yield Room(cluster=local, folder=folder, arbiter=ArbiterClient(timeout_s=20.0))
        finally:
            ray.shutdown()
    assert list(marked_processes(local.marker)) == []


@pytest.fixture(scope="module")
def stranger(room: Room) -> Iterator[Any]:
    """One of node-c's GPUs is in use by somebody else."""
    actor = Stranger.options(label_selector={"ray.io/node-id": room.names()["node-c"]}).remote()
    assert ray.get(actor.here.remote())
    yield actor
    ray.kill(actor)


@pytest.fixture(scope="module")
def run(room: Room, stranger: Any) -> Run:
    """It asks for six GPUs, goes on with two, and has a checkpoint that no Ray ever heard of."""
    run = Run(room, "long", max_gpus=6, min_gpus=2)
    train_by_hand(run)
    run.start()
    return run


def train_by_hand(run: Run) -> None:
    """A plain process trains a few steps, saves them, and is gone."""
    path = run.room.folder / "short.json"
    steps = run.config.model_copy(
        update={"steps": UNREGISTERED_STEPS, "optimizer": run.config.optimizer.model_copy(update={"decay_steps": 0})}
    )
    path.write_text(steps.model_dump_json(), encoding="utf-8")
    data = ["--data", run.order.data_dir, "--run-dir", str(run.run_dir)]
    command = [sys.executable, "-m", "tidegate.train", "--config", str(path), *data]
    subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, capture_output=True)
    found = newest_good(run.run_dir / "checkpoints").checkpoint
    assert found is not None
    assert found.manifest.step == UNREGISTERED_STEPS


def test_gpus_in_use_by_others_do_not_count(run: Run, room: Room) -> None:
    """Trap 2: Ray's elastic scaling counts all GPUs of live nodes, used or not, and waits for ever for the six.
    Remedy: the arbiter places on what is free, and the scaling policy is as many workers as the grant has nodes."""
    run.wait_running(after=0, ranks=4, deadline_s=90)
    names = {node: name for name, node in room.names().items()}
    assert sorted(names[node["node"]] for node in run.kept()["grant"]["nodes"]) == ["node-a", "node-b"]


def test_the_newest_checkpoint_is_what_storage_says(run: Run) -> None:
    """Trap 4: a checkpoint that Ray Train's registry missed (its node froze before the report was polled) is forgotten,
    and the run starts from step 0. Remedy: the newest checkpoint that verifies on storage, whoever made it."""
    assert run.notes("first_step")[0]["data"]["step"] == UNREGISTERED_STEPS + 1
    registries = [path.read_text() for path in (run.run_dir / "ray_train").rglob(SNAPSHOT)]
    assert not [text for text in registries if "step-" in text], "the registry knows it: this proves nothing"


def test_a_killed_controller_ends_neither_the_run_nor_its_group(run: Run, room: Room) -> None:
    """Trap 3: `fit()` raises at once whatever `max_failures` says, and the group leaks. Trap 7: Ray's cleaner deletes
    the group of a dead controller, a borrowed one too. Remedies: the coordinator starts another controller on the same
    group; the cleaner's callback is left out."""
    run.wait_commit()
    group, before = run.group_id(), run.status()
    at_work = room.actor_classes()
    assert "TrainHost" in at_work
    assert "PlacementGroupCleaner" not in at_work, "it would end the group within seconds of the controller"
    run.kill_controller()
    killed_s = time.monotonic()
    run.wait_running(after=before.generation, ranks=4, deadline_s=60)
    assert time.monotonic() - killed_s < 45
    assert run.notes("first_step")[-1]["data"]["steps_lost"] <= 20
    run.wait_commit()
    assert room.groups() == {group: "CREATED"}, "the group is another one, or there are two"
    assert run.group_id() == group


def test_a_torn_registry_of_ray_train_keeps_no_run_from_starting(run: Run) -> None:
    """Trap 5: `checkpoint_manager_snapshot.json` is overwritten in place; torn, it makes the experiment unstartable.
    Remedy: each controller has a folder of its own, and nothing is ever read back from another's."""
    # Ray Train makes it some time after the first step: its import comes after the workers' start.
    wait_until(lambda: any((run.run_dir / "ray_train").glob("*/")), 60, "Ray Train has a folder for its controller")
    folders = [path for path in (run.run_dir / "ray_train").iterdir() if path.is_dir()]
    assert folders
    for folder in folders:
        (folder / SNAPSHOT).write_text('{"checkpoint_results": [{"checkpoint_dir_na', encoding="utf-8")
    before = run.status()
    run.kill_controller()
    run.wait_running(after=before.generation, ranks=4, deadline_s=60)
    run.wait_commit()


def test_a_child_with_a_session_of_its_own_does_not_outlive_its_agent(run: Run) -> None:
    """A child that was started with `start_new_session=True` survives its actor's SIGKILL and keeps its GPU. Remedy:
    the agent marks all that its ranks execute, and an undertaker ends what carries the mark once the agent is gone
    (`test_orphans.py` has the rest of it). Ranks end by PR_SET_PDEATHSIG and by watching their agent."""
    member = next(iter(run.kept()["members"].values()))
    agent, node = member["agent"], member["node"]
    # As a rank would start it, whose environment is its agent's.
    orphan = subprocess.Popen(["sleep", "300"], env={**os.environ, AGENT_MARK: agent}, start_new_session=True)
    try:
        undertakers = [one for one in psutil.process_iter(["cmdline"]) if agent in (one.info["cmdline"] or ())]
        assert len(undertakers) == 1
        worker = undertakers[0].parent()
        assert worker is not None
        assert "ray" in worker.name(), worker
        slots = {slot["rank"]: slot["node"] for slot in run.kept()["plan"]["slots"]}
        pids = [pid for rank, pid in enumerate(run.gang()["pids"]) if slots[rank] == node]
        before = run.status()
        worker.kill()
        wait_until(lambda: orphan.poll() is not None, 10, "the child with its own session ends")
        wait_until(lambda: not any(map(psutil.pid_exists, pids)), 10, "its ranks end")
    finally:
        orphan.kill()
        orphan.wait()
    run.wait_running(after=before.generation, ranks=4, deadline_s=60)


def test_the_group_of_a_dead_run_is_removed(run: Run, room: Room, stranger: Any) -> None:
    """A detached placement group outlives whoever asked for it. Remedy: the arbiter removes the group of a run whose
    coordinator is gone for good."""
    assert len(room.groups()) == 1
    ray.kill(ray.get_actor(coordinator_name(run.name), namespace=NAMESPACE), no_restart=True)
    wait_until(lambda: room.groups() == {}, 30, "its group is removed")
    wait_until(lambda: run.claim()["state"] in ("done", "undone"), 30, "its claim has ended")
    ray.kill(stranger)
    wait_until(lambda: free_gpus() == 6, 30, "all GPUs are free, so no rank and no worker lives on")


def test_a_node_that_drains_between_placement_and_workers_does_not_hold_the_run(run: Run, room: Room) -> None:
    """Trap 1: Ray places no actor into a bundle on a draining node, and the controller waits for it without a limit: no
    step for ever, though other nodes are free. Remedy: the arbiter moves the gang, and by removing the group ends the
    wait."""
    drained = Run(room, "drained", max_gpus=4, min_gpus=4)
    wait_until(lambda: free_gpus() == 6, 30, "all GPUs are free")
    drained.start()
    wait_until(lambda: drained.claim()["state"] == "granted", 60, "it has a grant")
    victim = drained.claim()["nodes"][0]
    drain(victim)
    assert drained.notes("joined") == [], "too late: its workers run already"
    drained.wait_running(after=0, ranks=4, deadline_s=90)
    assert victim not in [node["node"] for node in drained.kept()["grant"]["nodes"]]
    assert len(room.groups()) == 1
    ray.get(drained.coordinator.stop.remote("the test is over"))
    wait_until(lambda: drained.status().over, 60, "the run is over")


def free_gpus() -> float:
    return float(ray.available_resources().get("GPU", 0.0))


def drain(node: str, within_s: float = 600.0) -> None:
    """As the autoscaler or `ray drain-node` does."""
    gcs = ray._private.worker.global_worker.gcs_client
    accepted, why = gcs.drain_node(node, PREEMPTION, "test", int(1000 * (time.time() + within_s)))
    assert accepted, why
