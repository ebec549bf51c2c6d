"""The arbiter's hands and a gang's life on a real Ray cluster: three nodes of two logical GPUs, no Serve.

The private hooks of Ray 2.60 that `arbiter/on_ray.py` and `gang/trainer.py` lean on are examined here: an upgrade that
moves them breaks these tests.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import ray
from ray.util import list_named_actors

from captioned import captioned_images, tiny_run
from tidegate.arbiter.actor import start_arbiter
from tidegate.arbiter.book import Book, apply
from tidegate.arbiter.client import NAMESPACE, ArbiterClient
from tidegate.arbiter.messages import ClaimSpec
from tidegate.arbiter.moves import CreateGroup, File, RemoveGroup
from tidegate.arbiter.on_ray import RayFleet
from tidegate.arbiter.states import ClaimState
from tidegate.arbiter.view import GroupState
from tidegate.checkpoint.folders import SHARED_MEMORY, folder_of
from tidegate.data.prepare import prepare
from tidegate.errors import ArbiterSilentError, ClaimNeverFitsError, RunExistsError
from tidegate.gang.coordinator import JOURNAL, start_coordinator
from tidegate.gang.host import host_name
from tidegate.gang.kept import KEPT
from tidegate.gang.order import RunOrder, RunStatus
from tidegate.ids import ClaimId, Tier
from tidegate.json_lines import read_lines
from tidegate.ports import free_port
from tidegate.spec.policy import ArbiterSpec, ClaimsSpec, GangSpec, Policy, ServingSpec
from tidegate.testing.local_cluster import LocalCluster, Ports, marked_processes
from waiting import wait_until

pytestmark = pytest.mark.cluster


def claim_spec(name: str, gpus: int, at_least: int, claim_class: str = "pretrain") -> ClaimSpec:
    return ClaimSpec(name=name, claim_class=claim_class, max_gpus=gpus, min_gpus=at_least, owner="test")


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    ports = Ports(gcs=free_port(), dashboard=free_port())
    local = LocalCluster(
        ports=ports, gpus_per_node=(2, 2, 2), head_cpus=2, node_cpus=1, environment={"OMP_NUM_THREADS": "1"}
    )
    with local:
        ray.init(address=local.address, namespace=NAMESPACE, log_to_driver=False)
        yield local
        ray.shutdown()
    assert list(marked_processes(local.marker)) == []


def test_the_fleet_as_ray_shows_it(cluster: LocalCluster) -> None:
    fleet = RayFleet(app="images")
    seen = fleet.look(Book())
    assert sorted((n.name, n.gpu_slots, n.free_gpu_slots) for n in seen.nodes.values()) == [
        ("node-a", 2, 2.0),
        ("node-b", 2, 2.0),
        ("node-c", 2, 2.0),
    ]
    assert seen.pools == {}
    claim = ClaimId("held")
    book = apply(Book(), File(claim=claim, spec=claim_spec("held", 6, 6), at_s=0.0))
    create = CreateGroup(claim=claim, nodes=tuple(seen.nodes), gpus_per_node=2)
    fleet.apply(create, book)
    fleet.apply(create, book)  # told twice, there is still one
    wait_until(lambda: fleet.look(book).groups.get(claim) is GroupState.READY, 20, "the group is ready")
    assert free_gpus(fleet) == [0.0, 0.0, 0.0]
    wait_until(lambda: fleet.look(book).gangs_gone == {claim: "its coordinator is gone"}, 20, "nobody leads it")
    fleet.apply(RemoveGroup(claim=claim), book)
    fleet.apply(RemoveGroup(claim=claim), book)
    wait_until(lambda: claim not in fleet.look(book).groups, 20, "the group is gone")
    wait_until(lambda: free_gpus(fleet) == [2.0, 2.0, 2.0], 20, "GPUs are free")


def free_gpus(fleet: RayFleet) -> list[float]:
    return [node.free_gpu_slots for node in fleet.look(Book()).nodes.values()]


class Run:
    """A gang that trains a tiny network for as long as the test likes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        prepare(captioned_images(folder / "images", 20), folder / "shards", seed=0, rows_per_shard=10)
        policy = Policy(
            arbiter=ArbiterSpec(state_dir=str(folder / "state")),
            serving=ServingSpec(protect=False),
            claims=ClaimsSpec(classes=("urgent", "pretrain", "serving"), dwell_s=0.0, min_run_s=0.0),
            # Other clusters and builds share this machine: a slow start is no fault here.
            gang=GangSpec(start_deadline_s=90.0),
        )
        ray.get(start_arbiter(policy).policy.remote())
        self.arbiter = ArbiterClient(timeout_s=20.0)
        config = tiny_run(name="long", steps=1_000_000, checkpoint={"every_steps": 20, "ram_every_steps": 5, "keep": 2})
        order = RunOrder(
            claim=claim_spec("long", 4, 2),
            config=config,
            data_dir=str(folder / "shards"),
            run_dir=str(folder / "run"),
        )
        self.order = order
        self.coordinator: Any = start_coordinator(order)
        ray.get(self.coordinator.start.remote(order))

    def restored_from(self) -> str:
        """The tier of the newest generation's checkpoint."""
        events = read_lines(self.folder / "run" / "events.jsonl")
        return str([line["tier"] for line in events if line["kind"] == "restored"][-1])

    def status(self) -> RunStatus:
        status: RunStatus = ray.get(self.coordinator.status.remote())
        return status

    def nodes_by_name(self) -> dict[str, str]:
        return {row["Labels"].get("tidegate/name", "head"): row["NodeID"] for row in ray.nodes() if row["Alive"]}

    def node_names(self) -> set[str]:
        """Of the nodes whose GPUs hold a rank."""
        gpus = set(self.gang()["gpus"])
        return {n["name"] for n in self.look()["nodes"] if gpus & {gpu["gpu"] for gpu in n["gpus"]}}

    def claim(self) -> dict[str, Any]:
        row: dict[str, Any] = next(row for row in self.look()["claims"] if row["claim"] == "long")
        return row

    def look(self) -> dict[str, Any]:
        return asyncio.run(self.arbiter.status())

    def gang(self) -> dict[str, Any]:
        return next((gang for gang in self.look()["gangs"] if gang["claim"] == "long"), {})

    def notes(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in read_lines(self.folder / "run" / JOURNAL) if line["kind"] == kind]

    def wait_for_generation(self, at_least: int, ranks: int) -> None:
        def running() -> bool:
            status = self.status()
            assert status.state != "failed", status.reason
            return status.state == "running" and status.generation >= at_least and status.world_size == ranks

        wait_until(running, 120, f"generation {at_least} or later runs with {ranks} ranks")

    def wait_for_commit(self) -> None:
        """A generation that ends before it commits counts towards the guard against endless restarts."""
        before = len(list(read_lines(self.folder / "run" / "checkpoints.jsonl")))
        wait_until(
            lambda: len(list(read_lines(self.folder / "run" / "checkpoints.jsonl"))) > before, 60, "a checkpoint"
        )

    def kept(self) -> dict[str, Any]:
        gang: dict[str, Any] = json.loads((self.folder / "run" / KEPT).read_text())["gang"]
        return gang

    def try_status(self) -> RunStatus | None:
        """None while the coordinator is between two processes."""
        try:
            return self.status()
        except ray.exceptions.RayActorError:
            return None

    def pids(self) -> list[int]:
        wait_until(lambda: len([p for p in self.gang().get("pids", ()) if p]) > 0, 20, "ranks are reported")
        return [pid for pid in self.gang()["pids"] if pid]


@pytest.fixture(scope="module")
def run(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(tmp_path_factory.mktemp("gang"))
    run.wait_for_generation(1, ranks=4)
    return run


def test_a_claim_that_never_fits_is_refused_through_the_client(run: Run) -> None:
    with pytest.raises(ClaimNeverFitsError, match="there is 6 GPUs on 3 live nodes") as error:
        asyncio.run(run.arbiter.claim(claim_spec("huge", 64, 64)))
    assert len(str(error.value).splitlines()) == 2, "a person gets a sentence and a hint, not a traceback"


def test_a_second_job_may_follow_the_run_but_not_change_it(run: Run) -> None:
    again = start_coordinator(run.order)
    assert ray.get(again.start.remote(run.order)) == "long"
    other = replace(run.order, claim=claim_spec("long", 64, 64), run_dir="/elsewhere")
    with pytest.raises(ray.exceptions.RayTaskError) as error:
        ray.get(again.start.remote(other))
    cause = error.value.cause
    assert isinstance(cause, RunExistsError)
    assert "max_gpus 4 (asked: 64)" in str(cause)
    assert "run_dir" in str(cause)


def test_a_killed_rank_comes_back_without_ray_train_noticing(run: Run) -> None:
    run.wait_for_commit()
    gpus = run.gang()["gpus"]
    os.kill(run.pids()[1], signal.SIGKILL)
    run.wait_for_generation(2, ranks=4)
    assert run.gang()["gpus"] == gpus
    # A peer on the other node may have lost its connection, and be heard of, first.
    died = [note["reason"] for note in (*run.notes("planned"), *run.notes("rank_died"))]
    assert any("was killed by signal 9" in reason for reason in died)
    first = run.notes("first_step")[-1]["data"]
    assert first["step"] > 1, "it started from nothing instead of its checkpoint"
    # The newest copy in memory may not be whole yet on every rank; the one before is.
    assert first["steps_lost"] < 10
    assert run.restored_from() == "memory", "of both nodes, each rank's from its own"
    assert run.notes("group_restarted") == []


def test_an_evicted_gpu_leaves_without_ray_train_noticing(run: Run) -> None:
    run.wait_for_commit()
    out = run.gang()["gpus"][3]
    node = next(n["node"] for n in run.look()["nodes"] if out in [gpu["gpu"] for gpu in n["gpus"]])
    ray.get(run.coordinator.evict.remote(node, out, "79 °C", 0.0))
    run.wait_for_generation(3, ranks=3)
    assert out not in run.gang()["gpus"]
    assert run.notes("group_restarted") == []


def test_the_coordinator_comes_back_and_no_rank_has_noticed(run: Run) -> None:
    """It stands off the head, is killed, restarted, and goes on where it was."""
    run.wait_for_commit()
    coordinator = process_of(run.coordinator)
    node = ray.get(run.coordinator.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id()))
    assert node != run.nodes_by_name()["head"]
    pids, before = run.pids(), run.status()
    coordinator.kill()
    wait_until(lambda: run.notes("reattached"), 60, "the coordinator is back")
    wait_until(lambda: run.try_status() is not None and run.status().step > before.step + 20, 60, "it hears of steps")
    assert run.status().generation == before.generation
    # What the arbiter knows lags behind: the first report after a restart is of the node that was heard of first.
    wait_until(lambda: run.pids() == pids, 10, "the same ranks in the gang's report")
    assert run.notes("group_restarted") == []


def test_a_killed_train_controller_is_followed_by_its_spare(run: Run) -> None:
    run.wait_for_commit()
    before, groups = run.status().generation, placement_groups()
    process_of(ray.get_actor(host_name("long", 1), namespace=NAMESPACE)).kill()
    run.wait_for_generation(before + 1, ranks=3)
    assert run.notes("train_lost")[-1]["data"]["train"] == 1
    assert run.notes("first_step")[-1]["data"]["steps_lost"] <= 20
    assert placement_groups() == groups


def test_a_killed_train_worker_restarts_the_group_on_the_same_nodes(run: Run) -> None:
    run.wait_for_commit()
    rank = psutil.Process(run.pids()[0])
    # Its forkserver is the node's warm one, so that its agent is not among its parents.
    member = next(iter(run.kept()["members"].values()))
    worker = next(
        parent
        for one in psutil.process_iter(["cmdline"])
        if member["agent"] in (one.info["cmdline"] or ())
        for parent in one.parents()[:1]
    )
    restarts, nodes = len(run.notes("group_restarted")), run.node_names()
    worker.kill()
    wait_until(lambda: len(run.notes("group_restarted")) > restarts, 60, "Ray Train restarts its group")
    wait_until(lambda: not rank.is_running() or rank.status() == "zombie", 10, "the rank died with its node's worker")
    restarted = run.notes("group_restarted")[-1]["at_s"]
    wait_until(lambda: run.notes("first_step")[-1]["at_s"] > restarted, 120, "the gang makes a step again")
    run.wait_for_generation(4, ranks=3)
    assert len(run.notes("group_restarted")) == restarts + 1
    assert run.notes("first_step")[-1]["data"]["steps_lost"] <= 20
    assert run.restored_from() == "memory", "the copies outlive ranks and agent"
    assert run.node_names() == nodes
    assert all(note["data"]["warm"] for note in run.notes("joined")[-2:]), "torch was imported once more"


def process_of(actor: Any) -> psutil.Process:
    return psutil.Process(ray.get(actor.__ray_call__.remote(lambda _: os.getpid())))


def placement_groups() -> set[str]:
    return {key for key, row in ray.util.placement_group_table().items() if row["state"] == "CREATED"}


def test_the_arbiter_comes_back_and_nothing_has_moved(run: Run) -> None:
    before, generation, pid = run.look()["claims"], run.status().generation, arbiter_pid()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: arbiter_pid() not in (None, pid), 30, "there is another arbiter")
    wait_until(lambda: run.gang().get("step", -1) > 0, 30, "it has heard of the gang")
    assert run.look()["claims"] == before
    assert run.status().generation == generation


def arbiter_pid() -> int | None:
    """None while it restarts."""
    arbiter = ray.get_actor("arbiter", namespace=NAMESPACE)
    try:
        pid: int = ray.get(arbiter.__ray_call__.remote(lambda _: os.getpid()), timeout=10)
    except ray.exceptions.RayError:
        return None
    return pid


def test_a_run_that_is_submitted_while_the_arbiter_is_silent_is_not_lost(run: Run) -> None:
    order = replace(run.order, claim=claim_spec("patient", 6, 6), run_dir=str(run.folder / "patient"))
    coordinator = start_coordinator(order)
    ray.get(coordinator.status.remote())
    pid = arbiter_pid()
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        filed = coordinator.start.remote(order)
        # Longer than one try of the coordinator's.
        with pytest.raises(ArbiterSilentError, match="no answer within 7 s"):
            asyncio.run(ArbiterClient(timeout_s=7.0).policy())
    finally:
        os.kill(pid, signal.SIGCONT)
    assert ray.get(filed, timeout=60) == "patient"
    ray.get(coordinator.stop.remote("the test is over"))
    wait_until(lambda: ray.get(coordinator.status.remote()).over, 60, "it has let go")
    ray.kill(coordinator)


def test_ray_exports_our_metrics(run: Run) -> None:
    def exported() -> set[str]:
        names: set[str] = set()
        for node in ray.nodes():
            text = httpx.get(f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics").text
            names |= {line.split("{")[0].split(" ")[0] for line in text.splitlines() if line.startswith("ray_tidegate")}
        return names

    wanted = {"ray_tidegate_gpus", "ray_tidegate_claims", "ray_tidegate_train_step", "ray_tidegate_train_ranks"}
    wait_until(lambda: wanted <= exported(), 60, f"{sorted(wanted)} are exported")


def test_a_node_is_swapped_for_a_spare_one(run: Run) -> None:
    """Another grant, another placement group: the gang forms again on it with the next generation."""
    run.wait_for_commit()
    before, group = run.status().generation, run.kept()["grant"]["placement_group"]
    # The one of which a GPU was evicted above: the other alone has the run's least.
    gone = run.kept()["evicted"]
    out = next(n["name"] for n in run.look()["nodes"] if any(gpu["gpu"] in gone for gpu in n["gpus"]))
    (spare,) = {n["name"] for n in run.look()["nodes"]} - run.node_names()
    asyncio.run(run.arbiter.quarantine(out, Tier.NONE, "XID 79"))
    wait_until(lambda: run.kept()["grant"]["placement_group"] != group, 60, "the gang has another grant")
    wait_until(lambda: spare in run.node_names() and run.status().state == "running", 90, "it runs on the spare")
    assert out not in run.node_names()
    assert run.status().generation > before
    first = run.notes("first_step")[-1]["data"]
    assert first["steps_lost"] <= 20
    asyncio.run(run.arbiter.pardon(out, "looked at"))


def test_a_stronger_claim_makes_it_save_leave_and_come_back(run: Run) -> None:
    """C031: it yields at a committed checkpoint, and goes on from it."""
    run.wait_for_commit()
    before = run.status()
    asyncio.run(run.arbiter.claim(claim_spec("soon", 6, 6, "urgent")))
    wait_until(lambda: run.status().state == "left", 60, "the gang leaves")
    left = run.notes("left")[-1]
    assert "not saved" not in left["reason"]
    steps = [line["step"] for line in read_lines(run.folder / "run" / "metrics.jsonl")]
    assert left["data"]["committed_step"] == steps[-1], "its last step is saved"
    came_back = len(run.notes("first_step"))
    wait_until(lambda: run.claim()["state"] == ClaimState.QUEUED, 30, "it queues again")
    asyncio.run(run.arbiter.release(ClaimId("soon"), "done"))
    run.wait_for_generation(before.generation + 1, ranks=4)
    # It may have come back with fewer ranks and then grown: that is one more generation, with a first step of its own.
    first = run.notes("first_step")[came_back]
    assert first["data"]["step"] == steps[-1] + 1, "nothing is done twice, nothing left out"


def test_a_stop_saves_then_leaves_and_the_gpus_come_back(run: Run) -> None:
    ray.get(run.coordinator.stop.remote("the job was stopped"))
    wait_until(lambda: run.status().over, 60, "the run is over")
    assert (run.status().state, run.status().reason) == ("finished", "the job was stopped")
    steps = [line["step"] for line in read_lines(run.folder / "run" / "metrics.jsonl")]
    commits = [line["step"] for line in read_lines(run.folder / "run" / "checkpoints.jsonl")]
    assert commits[-1] == steps[-1], "the last step was not saved"
    wait_until(
        lambda: not list(SHARED_MEMORY.glob(f"{folder_of('long', run.folder / 'run', {}).parent.name}/*")),
        30,
        "its copies in memory are gone",
    )
    wait_until(lambda: run.claim()["state"] == ClaimState.DONE, 30, "the claim is done")
    fleet = RayFleet(app="images")
    wait_until(lambda: free_gpus(fleet) == [2.0, 2.0, 2.0], 30, "GPUs are free")
    actors = {row["name"] for row in list_named_actors(all_namespaces=True)}
    assert not {name for name in actors if name.startswith("train-")}, "a Train controller is left"
